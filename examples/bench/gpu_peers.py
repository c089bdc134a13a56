"""trtc beside vLLM on one GPU, in turns: the shape of Llama-3.1-8B.

    python -m examples.bench.gpu make DIR --only steps      anywhere: trtc's engines
    python -m examples.bench.gpu_peers DIR                  on the GPU

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

from examples.bench.gpu import LLAMA_8B
from examples.bench.gpu_weights import with_weights
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import PARTS, GpuJob
from examples.bench.peers.processes import run
from examples.bench.peers.vllm_checkpoint import write_configuration, write_fp8_checkpoint
from trtc.runtime.executors.cuda.opening import device_name

VLLM = ("vllm==0.25.0", "torch==2.11.0")
ENGINES = ("fp8", "fp8-kv8", "bf16")
WEIGHTS = ("random", "zeros")
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Match:
    """One comparison."""

    engine: str
    weights: str

    @property
    def title(self) -> str:
        return f"{self.engine}, {self.weights} weights"

    @property
    def fp8(self) -> bool:
        return self.engine != "bf16"

    def trtc(self, directory: Path, parts: tuple[str, ...], repeats: int) -> Figures:
        engine = directory / f"8b-{self.engine}"
        if self.weights == "random":
            return _worker(
                sys.executable, "trtc_gpu_worker", self._job(engine, True, parts, repeats)
            )
        filled = with_weights(engine, directory / f"8b-{self.engine}-zeros", like_vllm=True)
        try:
            return _worker(
                sys.executable, "trtc_gpu_worker", self._job(filled, False, parts, repeats)
            )
        finally:
            shutil.rmtree(filled)

    def vllm(self, python: Path, directory: Path, parts: tuple[str, ...], repeats: int) -> Figures:
        own = self.weights == "zeros" or not self.fp8
        model = directory / f"vllm-{'fp8' if self.fp8 else 'bf16'}{'' if own else '-random'}"
        if own:
            write_configuration(model, LLAMA_8B, fp8=self.fp8)
        elif not model.exists():
            write_fp8_checkpoint(model, LLAMA_8B)
        return _worker(python, "vllm_worker", self._job(model, own, parts, repeats))

    def _job(self, model: Path, dummy: bool, parts: tuple[str, ...], repeats: int) -> GpuJob:
        return GpuJob(str(model), self.engine == "fp8-kv8", dummy, parts, repeats)


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


def compare(
    directory: Path,
    python: Path,
    matches: Sequence[Match],
    parts: tuple[str, ...],
    repeats: int,
) -> int:
    """Exit status: 1 if a runtime failed, which ends its match alone."""
    found: dict[str, dict[str, Figures]] = {}
    failed = 0
    for match in matches:
        try:
            trtc = match.trtc(directory, parts, repeats)
            print(f"{match.title}, trtc: {json.dumps(trtc)}", flush=True)
            vllm = match.vllm(python, directory, parts, repeats)
        except RunFailed as failure:
            print(f"{match.title}: {failure}", flush=True)
            failed = 1
            continue
        found[match.title] = {"vllm": vllm, "trtc": trtc}
        print("\n".join(table(match.title, vllm, trtc)), flush=True)
    (directory / "peers.json").write_text(json.dumps(found, indent=1))
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
    return compare(given.directory, python, matches, tuple(given.parts), given.repeats)


if __name__ == "__main__":
    sys.exit(main())
