"""trtc beside vLLM on one GPU, in turns: the shape of Llama-3.1-8B.

    python -m examples.bench.gpu make DIR --only steps      anywhere: trtc's engines
    python -m examples.bench.gpu_peers DIR                  on the GPU, with trtc[build,cuda]

Installs vLLM with pip in an environment under DIR, unless `--vllm` names the Python of one. Both
are given the same work by their APIs in their own processes, one after the other; prints medians
and ratios and writes DIR/peers.json.

Weights are of two kinds, because a GPU at its power limit is faster the more zeros it multiplies
by: `random`, the same E4M3 codes for both, and `zeros`, what `--load-format dummy` of vLLM makes of
E4M3 weights, 98% of them zeros. In bf16 vLLM's own are random.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.bench.gpu_shapes import LLAMA_8B
from examples.bench.gpu_weights import with_weights
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import PARTS, GpuJob
from examples.bench.peers.processes import run
from examples.bench.peers.vllm_checkpoint import write_configuration, write_fp8_checkpoint
from trtc.builder.checkpoint.reader import INDEX_FILE
from trtc.runtime.executors.cuda.opening import device_name

VLLM = ("vllm==0.25.0", "torch==2.11.0")
ENGINES = ("fp8", "fp8-kv8", "bf16")
WEIGHTS = ("random", "zeros")
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

    def job(self, model: Path, *, fp8_kv: bool, dummy_weights: bool) -> GpuJob:
        return GpuJob(str(model), fp8_kv, dummy_weights, self.parts, self.repeats)


@dataclass(frozen=True)
class Match:
    """One comparison."""

    engine: str
    weights: str

    @property
    def title(self) -> str:
        return f"{self.engine}, {self.weights} weights"

    def trtc(self, setting: Setting) -> Figures:
        engine = setting.directory / f"8b-{self.engine}"
        if self.weights == "random":
            return self._run(sys.executable, "trtc_gpu_worker", setting, engine, dummy=True)
        filled = with_weights(engine, engine.with_name(f"{engine.name}-zeros"), like_vllm=True)
        try:
            return self._run(sys.executable, "trtc_gpu_worker", setting, filled, dummy=False)
        finally:
            shutil.rmtree(filled)

    def vllm(self, setting: Setting) -> Figures:
        fp8 = self.engine != "bf16"
        if self.weights == "zeros" or not fp8:
            model = setting.directory / f"vllm-{'fp8' if fp8 else 'bf16'}"
            write_configuration(model, LLAMA_8B, fp8=fp8)
            return self._run(setting.vllm, "vllm_worker", setting, model, dummy=True)
        model = setting.directory / "vllm-fp8-random"
        if not (model / INDEX_FILE).exists():
            write_fp8_checkpoint(model, LLAMA_8B)
        return self._run(setting.vllm, "vllm_worker", setting, model, dummy=False)

    def _run(
        self, python: str | Path, module: str, setting: Setting, model: Path, *, dummy: bool
    ) -> Figures:
        fp8_kv = self.engine == "fp8-kv8"
        return _worker(python, module, setting.job(model, fp8_kv=fp8_kv, dummy_weights=dummy))


def _worker(python: str | Path, module: str, job: GpuJob) -> Figures:
    done = run([python, "-m", f"examples.bench.peers.{module}"], stdin=job.to_json())
    found: Figures = done.last_json()
    return found


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
        try:
            trtc = match.trtc(setting)
            print(f"{match.title}, trtc: {json.dumps(trtc)}", flush=True)
            vllm = match.vllm(setting)
        except RunFailed as failure:
            print(f"{match.title}: {failure}", flush=True)
            failed = 1
            continue
        found[match.title] = {"vllm": vllm, "trtc": trtc}
        print("\n".join(table(match.title, vllm, trtc)), flush=True)
    (setting.directory / "peers.json").write_text(json.dumps(found, indent=1))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vllm", type=Path, help="Python of an environment that has vLLM")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    python = given.vllm
    if python is None:
        environment = PeerEnvironment(given.directory / "vllm-venv", given.directory / "vllm.log")
        environment.install(VLLM)
        python = environment.python
    matches = [
        Match(engine, weights)
        for engine in given.engines
        for weights in given.weights
        if engine != "bf16" or weights == "random"
    ]
    print(device_name(), flush=True)
    return compare(Setting(given.directory, python, tuple(given.parts), given.repeats), matches)


if __name__ == "__main__":
    sys.exit(main())
