"""Instruction-set levels that engines are compiled for, with their compiler flags."""

from typing import NamedTuple


class Isa(NamedTuple):
    """A level that kernels have code for."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    """What /proc/cpuinfo must list for the code to run."""


_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16")

ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("generic", (), frozenset()),
        Isa("x86-64-v3", ("-march=x86-64-v3",), frozenset(_V3)),
        Isa(
            "x86-64-v4",
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
            frozenset((*_V4, "avx512_vnni")),
        ),
    )
}
"""From the fewest required CPU features to the most."""

CXX_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""For every instruction set. Kernels write their fused multiply-adds themselves: a compiler that
contracts expressions as it likes would round the same row differently in two kernels."""
