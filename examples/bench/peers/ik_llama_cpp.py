"""ik_llama.cpp, a fork of llama.cpp for CPUs: sources that are there, compiled for this CPU.

It is on no package index. It reads the models that llama.cpp's tools made, and decodes are measured
by its own llama-batched-bench; its server is not run.
"""

from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.contestants import Figures
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.failures import RunFailed, Unavailable
from examples.bench.peers.llama_cpp import LlamaCpp, bench_options, compile_tools
from examples.bench.peers.processes import Command, run

RUNTIME = "ik_llama.cpp"
_BENCH = "llama-batched-bench"
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
_COLUMNS = 10
_PROMPT_RATE, _DECODE_RATE = 5, 7
"""Of the table that llama-batched-bench prints."""


@dataclass(frozen=True)
class IkLlamaCpp:
    """A contestant, for decodes. Weights are repacked at load, the rest is as llama.cpp's."""

    tool: Path
    like: LlamaCpp
    """Whose model and setting it has."""
    runtime: str = RUNTIME

    @property
    def name(self) -> str:
        return f"{self.runtime} {self.like.dtype}"

    @property
    def bits(self) -> int:
        return self.like.bits

    @property
    def read_bytes(self) -> int:
        return self.like.read_bytes

    def decode(self, batch: int, seed: int) -> Figures:
        """By llama-batched-bench, which draws its own tokens and warms up by itself."""
        setting = self.like.setting
        options = bench_options(setting, self.like.model, batch)
        log: Command = ["--log-file", setting.logs / "ik_llama_cpp_run"]
        done = run([self.tool, *options, "--run-time-repack", *log])
        prefill, decode = rates(done.stderr)
        return {
            "decode_tok_s": decode,
            "prefill_tok_s": prefill,
            "peak_rss_bytes": done.peak_rss,
        }

    def start(self, seed: int) -> Figures:
        raise RunFailed("its server is not run")

    def streams(self, seed: int) -> Figures:
        raise RunFailed("its server is not run")

    def chat(self, seed: int, *, reuse: bool) -> Figures:
        raise RunFailed("its server is not run")


def rates(output: str) -> tuple[float, float]:
    """(prompt tokens a second, decoded tokens a second) of the last row of a table.

    Raises:
        RunFailed: there is none.
    """
    rows = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
    numbers = [row for row in rows if len(row) == _COLUMNS and row[0].strip().isdigit()]
    if not numbers:
        raise RunFailed(f"{_BENCH} printed no figures: {output[-200:]!r}")
    return float(numbers[-1][_PROMPT_RATE]), float(numbers[-1][_DECODE_RATE])


def prepare(
    source: Path, output: Path, environment: PeerEnvironment, log: Path, like: list[LlamaCpp]
) -> list[IkLlamaCpp]:
    """Compile what is not there yet: half an hour on two cores, once.

    Args:
        source: its sources.
        output: where the compiled tool goes.
        log: of compiling it.
        like: llama.cpp's contestants, whose models are read.

    Raises:
        Unavailable: no sources, no models, or they do not compile.
    """
    if not (source / "CMakeLists.txt").exists():
        raise Unavailable(f"--ik-llama-cpp: {source} has no CMakeLists.txt")
    missing = [one.model for one in like if not one.model.exists()]
    if missing:
        raise Unavailable(f"{missing[0]} is not there: llama.cpp makes it, run both")
    tool = output / "bin" / _BENCH
    if not tool.exists():
        compile_tools(source, output, _CMAKE_OPTIONS, (_BENCH,), environment, log)
    return [IkLlamaCpp(tool, one) for one in like]
