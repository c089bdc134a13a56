"""Instruction sets that a CPU engine holds code for: one literal table, best first.

An engine may hold one shared object per level over the same weights; the builder compiles the
levels asked for, the runtime loads the best one whose CPU flags this machine has. The test is made
before the object is opened, because code of the wrong level dies with SIGILL.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Isa:
    """One instruction-set level."""

    name: str
    machines: tuple[str, ...]
    """`platform.machine()` values that can run it; () means any."""
    cpu_flags: tuple[str, ...]
    """What /proc/cpuinfo must list."""
    compiler_flags: tuple[str, ...]


_V3_FLAGS = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa(
            "x86-64-v4",
            ("x86_64",),
            (
                *_V3_FLAGS,
                *("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
                *("avx512_vnni", "avx512_bf16"),
            ),
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        ),
        Isa("x86-64-v3", ("x86_64",), _V3_FLAGS, ("-march=x86-64-v3",)),
        Isa("generic", (), (), ()),
    )
}


def object_file(isa: str) -> str:
    """File name of the shared object for a level: `engine-x86-64-v4.so`."""
    return f"engine-{isa}.so"


def runnable_isas(machine: str, cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """Levels that a CPU can run, best first; always ends in `generic`."""
    return tuple(
        isa.name
        for isa in ISAS.values()
        if (not isa.machines or machine in isa.machines) and cpu_flags.issuperset(isa.cpu_flags)
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
