"""Which compiled code this machine can run, decided before any of it is opened.

An engine may hold one shared object an instruction-set level over the same weights. Code of the
wrong level dies with SIGILL, so the choice is made from the CPU's flags, never by trying.
"""

import platform
from pathlib import Path

from trtc.plugins.cpu.isa import ISAS


def object_file(isa: str) -> str:
    """File name of an engine's shared object for a level."""
    return f"engine-{isa}.so"


def runnable_isas(
    machine: str | None = None, flags: frozenset[str] | None = None
) -> tuple[str, ...]:
    """Levels that a CPU can run, best first; the last is always `generic`.

    Args:
        machine: as `platform.machine()` says; None: this one.
        flags: None: those of this machine.
    """
    machine = platform.machine() if machine is None else machine
    flags = read_cpu_flags() if flags is None else flags
    return tuple(
        isa.name
        for isa in reversed(ISAS.values())
        if flags.issuperset(isa.cpu_flags)
        and (machine == "x86_64" or not isa.name.startswith("x86"))
    )


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags that the kernel has enabled; empty where it lists none.

    The kernel's list is used instead of the CPUID instruction because a flag there also means that
    the operating system saves the registers.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
