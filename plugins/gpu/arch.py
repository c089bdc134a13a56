"""The facts of each SM that kernels are compiled for, in one table.

A kernel queries a feature or a size, never the number of an SM. What was measured on one SM is a
tactic, and lies beside the kernel that it is of.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.protos.errors import UnsupportedError

DEFAULT_SHARED_BYTES = 48 << 10
"""Shared memory of a launch that needs no raised limit (cuFuncSetAttribute), on every SM."""
_LARGE_SHARED_BYTES = 128 << 10


@dataclass(frozen=True)
class Arch:
    """One SM."""

    sm: int
    """Compute capability: 90 is 9.0."""
    cubin_target: str
    """`sm_90a`: with the "a" code runs on this SM and on no later one, and has all of its
    instructions."""
    shared_bytes: int
    """The most that a block may have, with the limit of its launch raised (cuFuncSetAttribute)."""
    multiprocessors: int
    """SMs of its data centre GPU, which tactics assume. A GPU with another number runs correctly,
    with idle SMs or several blocks an SM."""
    has_e4m3: bool = False
    """Converts and multiplies E4M3 in hardware."""
    has_e2m1: bool = False
    """Multiplies E2M1 in hardware."""
    has_pdl: bool = False
    """Programmatic dependent launch: a kernel may start before the one before it has ended."""
    has_bulk_copies: bool = False
    """Copies and prefetches ranges of memory by one instruction (cp.async.bulk)."""
    has_clusters: bool = False
    """Blocks of a cluster read each other's shared memory."""
    has_wgmma: bool = False
    """WGMMA, and TMA with the layouts that it reads: the instructions of sm_90a."""
    has_rtx_plans: bool = False
    """TensorRT for RTX makes plans for it."""

    @property
    def name(self) -> str:
        return f"sm_{self.sm}"

    @property
    def macros(self) -> Mapping[str, int]:
        """Macros of every CUDA C++ kernel: the features that plugins/gpu/ptx.cuh depends on."""
        return {
            "HAS_E4M3": int(self.has_e4m3),
            "HAS_PDL": int(self.has_pdl),
            "HAS_BULK_COPIES": int(self.has_bulk_copies),
        }

    @property
    def has_large_shared(self) -> bool:
        """Shared memory holds several multi-stage rings: 163 KB or more, not 99 KB."""
        return self.shared_bytes > _LARGE_SHARED_BYTES


SM_90 = Arch(
    sm=90,
    cubin_target="sm_90a",
    shared_bytes=227 << 10,
    multiprocessors=132,
    has_e4m3=True,
    has_pdl=True,
    has_bulk_copies=True,
    has_clusters=True,
    has_wgmma=True,
)
"""H100, H200: what kernels of files called *_sm90 run on."""
_TABLE = (
    Arch(80, "sm_80", shared_bytes=163 << 10, multiprocessors=108, has_rtx_plans=True),
    Arch(86, "sm_86", shared_bytes=99 << 10, multiprocessors=84, has_rtx_plans=True),
    Arch(
        89,
        "sm_89",
        shared_bytes=99 << 10,
        multiprocessors=142,
        has_e4m3=True,
        has_rtx_plans=True,
    ),
    SM_90,
    Arch(
        100,
        "sm_100a",
        shared_bytes=227 << 10,
        multiprocessors=148,
        has_e4m3=True,
        has_e2m1=True,
        has_pdl=True,
        has_bulk_copies=True,
        has_clusters=True,
    ),
    Arch(
        120,
        "sm_120a",
        shared_bytes=99 << 10,
        multiprocessors=188,
        has_e4m3=True,
        has_e2m1=True,
        has_pdl=True,
        has_bulk_copies=True,
        has_clusters=True,
        has_rtx_plans=True,
    ),
)
ARCHS: Mapping[int, Arch] = {arch.sm: arch for arch in _TABLE}
"""By compute capability: those that kernels are compiled and tested for."""

RTX_SMS = tuple(arch.sm for arch in _TABLE if arch.has_rtx_plans)


def parse_sm(text: str) -> int:
    """`sm_90` -> 90.

    Raises:
        UnsupportedError: not an SM that kernels are compiled for.
    """
    known = {arch.name: arch.sm for arch in ARCHS.values()}
    if text not in known:
        raise UnsupportedError(
            f"{text!r} is not an SM that trtc compiles kernels for",
            field="--target",
            remedy=f"Use one of {', '.join(known)}",
        )
    return known[text]


def sm_of_target(kind: str, detail: str) -> int:
    """The SM of `--target kind:detail`.

    Raises:
        UnsupportedError: not an SM that kernels are compiled for, or none.
    """
    if not detail:
        raise UnsupportedError(
            "says no SM",
            field="--target",
            remedy=f"Use one of {', '.join(f'{kind}:sm_{sm}' for sm in ARCHS)}",
        )
    return parse_sm(detail)
