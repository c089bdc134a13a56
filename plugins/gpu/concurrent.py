"""Launches that run beside the one before them, because they read nothing that it writes.

A stream runs kernels in order, and programmatic dependent launch (PDL) overlaps only their ends and
beginnings. Of three launches in a row,

    before -> first -> second -> after

`second` runs beside all of `first` if

    first     lets the next kernel start when its own wait is over (`releasing_late`): `second` then
              finds complete what `before` and all kernels earlier wrote
    second    waits when all else is done (`waiting_last`): its end is then the end of `first` too,
              and `after` may read what either wrote

so neither a second stream nor another node of the CUDA graph is needed. Two launches make a pair;
what comes after them waits for both.
"""

from dataclasses import replace

from trtc.plugins.gpu.lowering import Launch
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.gpu.triton_launch import OVERLAPS

_RELEASES_LATE, _WAITS_LAST = 2, 3
"""Values of OVERLAPS, in plugins/gpu/triton.py."""


def releasing_late(launch: Launch) -> Launch:
    """The same launch, with which the next one starts only when its wait is over, if it is one of
    PDL: all others end before the next one starts."""
    return _with(launch, "RELEASES_LATE", _RELEASES_LATE)


def waiting_last(launch: Launch) -> Launch:
    """The same launch, which `may_wait_last`, for a place after one that releases late, if it is
    one of PDL."""
    return _with(launch, "WAITS_LAST", _WAITS_LAST)


def _with(launch: Launch, macro: str, overlaps: int) -> Launch:
    if not launch.overlaps:
        return launch
    kernel = launch.kernel
    added = {macro: 1} if isinstance(kernel, CudaSource) else {OVERLAPS: overlaps}
    return replace(launch, kernel=replace(kernel, constants={**kernel.constants, **added}))
