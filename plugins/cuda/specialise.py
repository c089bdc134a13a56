"""Launches of Triton kernels, whose parameters are tensors by name."""

from collections.abc import Mapping
from typing import Any

from trtc.plugins.cuda.compile import KernelParameter, KernelSource
from trtc.plugins.cuda.launch import DIMS, ONE, Extent, Launch, Site, Variant
from trtc.protos.dtypes import DTYPES

OVERLAP_SM = 90
"""From this SM on a kernel may start before the one before it has ended."""
OVERLAPS = "OVERLAPS"
"""The constant of every kernel that says so (device.py)."""
_VECTOR_BYTES = 16
"""The widest load or store of a thread."""
_COUNTS = {"tokens": 0, "sequences": 1, "rows": 2}
"""Where `dims` counts an axis."""


def triton_launch(
    function: Any,
    *,
    dtypes: Mapping[str, str],
    constants: Mapping[str, int | float | bool | str],
    programs: Extent,
    num_warps: int,
    sm: int,
) -> Launch:
    """A launch of a Triton function over a grid of one axis.

    Args:
        dtypes: element types of all tensors there are. What the function has beside these and
            `constants` it goes without.
        constants: all but OVERLAPS.
    """
    all_constants = {**constants, OVERLAPS: sm >= OVERLAP_SM}
    tensors = [name for name in function.arg_names if name not in all_constants]
    present = tuple(name for name in tensors if name in dtypes)
    return Launch(
        kernel=KernelSource(
            function=function,
            parameters=tuple(KernelParameter(name, dtypes[name]) for name in present),
            constants=all_constants,
            num_warps=num_warps,
            absent=tuple(name for name in tensors if name not in dtypes),
        ),
        arguments=present,
        grid=(programs, ONE, ONE),
        overlaps=sm >= OVERLAP_SM,
    )


def site_launch(
    site: Site,
    function: Any,
    *,
    constants: Mapping[str, int | float | bool | str],
    programs: Extent,
    num_warps: int,
) -> Launch:
    """A launch of a Triton function whose tensors are the operator's parameters and DIMS."""
    return triton_launch(
        function,
        dtypes={**site.dtypes, DIMS: "i32"},
        constants=constants,
        programs=programs,
        num_warps=num_warps,
        sm=site.sm,
    )


def only(site: Site, launch: Launch) -> tuple[Variant, ...]:
    """One launch for every step."""
    return (Variant(work=(launch,), max_rows=site.limits.max_num_tokens),)


def count_index(axis: str) -> int:
    """Which of `dims` counts the real rows of "tokens", "sequences" or "rows"."""
    return _COUNTS[axis]


def vector(dtype: str) -> int:
    """Elements of one 16-byte access."""
    return _VECTOR_BYTES * 8 // DTYPES[dtype].bits
