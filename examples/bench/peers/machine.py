"""What the machine can do at most, measured between the runs."""

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from examples.bench.peers.contestants import Figures
from examples.bench.peers.failures import Unavailable
from examples.bench.peers.processes import run, run_step

_SOURCE = Path(__file__).with_name("machine.cpp")
_SECONDS = 0.5


@dataclass(frozen=True)
class Machine:
    """A compiled machine.cpp."""

    program: Path
    threads: int
    seconds: float
    """That each figure is measured for."""

    def measure(self) -> Figures:
        """read_bytes_s, int8_ops_s, bf16_ops_s; those that the CPU has."""
        figures = run([self.program, str(self.threads), str(self.seconds)]).last_json()
        return {name: value for name, value in figures.items() if value is not None}


def prepare(directory: Path, threads: int, log: Path, seconds: float = _SECONDS) -> Machine:
    """Compile for this CPU.

    Raises:
        Unavailable: no compiler, or not an x86 CPU.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("no C++ compiler: install g++")
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "machine"
    flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
    run_step([compiler, *flags, _SOURCE, "-o", program], log)
    return Machine(program, threads, seconds)


def facts(threads: int) -> dict[str, object]:
    """What the report says of the machine."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
            break
    return {"cpu": model, "system": platform.platform(), "threads": threads}
