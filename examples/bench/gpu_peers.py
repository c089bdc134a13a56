"""trtc beside vLLM on one GPU, in turns: the shapes of published models.

    python -m examples.bench.gpu make DIR --only steps           anywhere: trtc's engines
    python -m examples.bench.gpu_peers DIR [--engines NAME ...]  on the GPU, with trtc[build,cuda]

Installs vLLM with pip in an environment under DIR, unless `--vllm` names the Python of one. Both
are given the same work by their APIs in their own processes, one after the other; prints each
figure as soon as it is there, then the ratios, and writes DIR/peers.json. `--sides` runs one of
them alone, or `routing`: how many experts vLLM's rows choose, and whether its logits are finite.

Weights are random, by the same distributions for both: those of trtc's `--dummy-weights`, which
peers/vllm_weights.py writes over vLLM's parameters. Those of Llama-3.1-8B's shape are of a second
kind too, because a GPU at its power limit is faster the more zeros it multiplies by: `zeros`, what
`--load-format dummy` of vLLM makes of E4M3 weights, 98% of them zeros.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from examples.bench.gpu import UNWEIGHTED, Variation
from examples.bench.gpu_shapes import QWEN3_5_35B, SHAPES
from examples.bench.gpu_weights import with_weights
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import PARTS, GpuJob, Workload
from examples.bench.peers.processes import lines
from examples.bench.peers.vllm_checkpoint import STATIC_FP8, write_configuration
from trtc.runtime.executors.cuda.opening import device_name

VLLM = ("vllm==0.26.0", "torch==2.11.0", "ml_dtypes==0.6.0")
"""The newest for this version of torch; ml_dtypes for trtc's distributions, which it draws too."""
ENGINES = {
    one.name: one
    for one in UNWEIGHTED
    if one.dtype in ("fp8", "bf16", "mxfp4") and one.shape != "qwen3.5-9b"
}
WEIGHTS = ("random", "zeros")
_MIXED_WEIGHTS = "8b"
"""The shape whose weights are of either kind; those of others are random."""
SIDES = ("trtc", "vllm", "routing")
_COMPARED = ("trtc", "vllm")
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_QUANTIZATION: Mapping[str, Mapping[str, Any] | None] = {
    "fp8": STATIC_FP8,
    "bf16": None,
    "mxfp4": _MXFP4,
}
_QWEN3_NEXT = QWEN3_5_35B | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 5120,
}
"""vLLM opens Qwen3.5 only with its vision tower and processor; the layers of Qwen3-Next are the
same but for how their projections are stored."""
_VLLM_CONFIGS: Mapping[str, Mapping[str, Any]] = {"qwen3.5-35b-a3b": _QWEN3_NEXT}
_ANSWER = '["'
"""How a worker's figures begin: a list of a name and a number."""
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Setting:
    """What all matches share."""

    directory: Path
    """With trtc's engines, and for what is made of them."""
    vllm: Path
    """Python of its environment."""
    parts: tuple[str, ...]
    repeats: int
    longest_decode: int
    """Tokens of context; decodes of longer ones are left out."""
    sides: tuple[str, ...] = _COMPARED
    """Of SIDES."""
    results: str = "peers.json"
    """File in `directory`."""

    def workload(self, shape: str) -> Workload:
        whole = SHAPES[shape].workload
        decodes = tuple(one for one in whole.decodes if one[1] <= self.longest_decode)
        return replace(whole, decodes=decodes)


@dataclass(frozen=True)
class Match:
    """One comparison."""

    engine: Variation
    weights: str

    @property
    def title(self) -> str:
        return f"{self.engine.engine}, {self.weights} weights"

    def run(self, side: str, setting: Setting) -> Figures:
        if side == "trtc":
            return self._trtc(setting)
        module = "vllm_worker" if side == "vllm" else "vllm_routing"
        return self._run(setting.vllm, module, setting, self._checkpoint(setting.directory))

    def _trtc(self, setting: Setting) -> Figures:
        engine = setting.directory / self.engine.engine
        if self.weights != "zeros":
            return self._run(sys.executable, "trtc_gpu_worker", setting, engine)
        filled = with_weights(engine, engine.with_name(f"{engine.name}-zeros"), like_vllm=True)
        try:
            return self._run(sys.executable, "trtc_gpu_worker", setting, filled)
        finally:
            shutil.rmtree(filled)

    def _checkpoint(self, directory: Path) -> Path:
        shape, dtype = self.engine.shape, self.engine.dtype
        config = _VLLM_CONFIGS.get(shape, SHAPES[shape].config)
        return write_configuration(
            directory / f"vllm-{shape}-{dtype}", config, _QUANTIZATION[dtype]
        )

    def _run(self, python: str | Path, module: str, setting: Setting, model: Path) -> Figures:
        job = GpuJob(
            str(model),
            fp8_kv=self.engine.kv_dtype == "fp8",
            weights=self.weights,
            parts=setting.parts,
            repeats=setting.repeats,
            workload=setting.workload(self.engine.shape),
        )
        found: dict[str, float] = {}
        for name, value in _worker(python, module, job):
            print(f"{self.title}, {module}: {name} {value:,.2f}", flush=True)
            found[name] = value
        return found


def _worker(python: str | Path, module: str, job: GpuJob) -> Iterator[tuple[str, float]]:
    """Its answers, among whatever else is printed there."""
    for line in lines([python, "-m", f"examples.bench.peers.{module}"], stdin=job.to_json()):
        if line.startswith(_ANSWER):
            name, value = json.loads(line)
            yield name, value


def table(title: str, vllm: Figures, trtc: Figures) -> list[str]:
    """Lines that show both and how many times as fast trtc is."""
    lines = [f"{title:42} {'vLLM':>10} {'trtc':>10} {'ratio':>7}"]
    for name, ours in trtc.items():
        theirs = vllm[name]
        ratio = ours / theirs if name.endswith("tok/s") else theirs / ours
        digits = 2 if ours < 1000 else 0
        lines.append(f"  {name:40} {theirs:10,.{digits}f} {ours:10,.{digits}f} {ratio:6.2f}x")
    return lines


def compare(setting: Setting, matches: Sequence[Match]) -> int:
    """Exit status: 1 if a runtime failed, which ends its match alone."""
    found: dict[str, dict[str, Figures]] = {}
    failed = 0
    for match in matches:
        sides: dict[str, Figures] = {}
        try:
            for side in setting.sides:
                sides[side] = match.run(side, setting)
        except RunFailed as failure:
            print(f"{match.title}: {failure}", flush=True)
            failed = 1
        if sides:
            found[match.title] = sides
        if all(side in sides for side in _COMPARED):
            print("\n".join(table(match.title, sides["vllm"], sides["trtc"])), flush=True)
        (setting.directory / setting.results).write_text(json.dumps(found, indent=1))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vllm", type=Path, help="Python of an environment that has vLLM")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=tuple(ENGINES))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=_COMPARED)
    parser.add_argument("--results", default="peers.json", help="file in the directory")
    parser.add_argument("--longest-decode", type=int, default=1 << 30, help="tokens of context")
    given = parser.parse_args()
    python = given.vllm
    if python is None:
        environment = PeerEnvironment(given.directory / "vllm-venv", given.directory / "vllm.log")
        environment.install(VLLM)
        python = environment.python
    matches = [
        Match(ENGINES[engine], weights)
        for engine in given.engines
        for weights in given.weights
        if weights == "random" or (engine != "bf16" and ENGINES[engine].shape == _MIXED_WEIGHTS)
    ]
    print(device_name(), flush=True)
    setting = Setting(
        given.directory,
        python,
        tuple(given.parts),
        given.repeats,
        given.longest_decode,
        tuple(given.sides),
        given.results,
    )
    return compare(setting, matches)


if __name__ == "__main__":
    sys.exit(main())
