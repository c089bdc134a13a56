"""Launches of Triton kernels, whose parameters are tensors by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from trtc.plugins.gpu.arch import ARCHS, DEFAULT_SHARED_BYTES
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site, Variant
from trtc.plugins.gpu.sources import DEFAULT_STAGES, KernelParameter, KernelSource
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import UnsupportedError

OVERLAPS = "OVERLAPS"
"""The constant of every kernel that says so (plugins/gpu/triton.py)."""
_VECTOR_BYTES = 16
"""The widest load or store of a thread."""
_COUNTS = {"tokens": 0, "sequences": 1, "rows": 2}
"""Where `dims` counts an axis."""
_FEW_ROWS = 8
"""Up to so many, all programs of a step run at once."""
_MIN_ROW_BLOCK = 256
_ROW_WARPS: Mapping[int, int] = {256: 1, 512: 2, 1024: 4, 2048: 4, 4096: 8, 8192: 8}
"""By elements of a row."""
_MOST_ROW_WARPS = 16
"""For wider rows."""
_MANY_ROWS = 512
"""From so many on as many programs as can run at once do."""


@dataclass(frozen=True)
class Programs:
    """What a program takes of a row."""

    block: int
    """Columns."""
    num_warps: int


MANY_ROWS = Programs(2048, 4)
"""With half of either, E4M3 was written at two thirds of the speed (H200)."""


def triton_launch(
    function: Any,
    *,
    dtypes: Mapping[str, str],
    constants: Mapping[str, int | float | bool | str],
    programs: Extent,
    num_warps: int,
    sm: int,
    num_stages: int = DEFAULT_STAGES,
    max_shared_bytes: int = DEFAULT_SHARED_BYTES,
) -> Launch:
    """A launch of a Triton function over a grid of one axis.

    Args:
        dtypes: element types of all tensors there are. What the function has beside these and
            `constants` it goes without.
        constants: all but OVERLAPS.
    """
    all_constants = {**constants, OVERLAPS: ARCHS[sm].has_pdl}
    tensors = [name for name in function.arg_names if name not in all_constants]
    present = tuple(name for name in tensors if name in dtypes)
    return Launch(
        kernel=KernelSource(
            function=function,
            parameters=tuple(KernelParameter(name, dtypes[name]) for name in present),
            constants=all_constants,
            num_warps=num_warps,
            num_stages=num_stages,
            absent=tuple(name for name in tensors if name not in dtypes),
            max_shared_bytes=max_shared_bytes,
        ),
        arguments=present,
        grid=(programs, ONE, ONE),
        overlaps=ARCHS[sm].has_pdl,
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


def by_columns(
    site: Site,
    function: Any,
    *,
    columns: int,
    vector_of: str,
    constants: Mapping[str, int | float | bool | str],
    axis: Literal["tokens", "rows"] | None = None,
    few_rows: Programs = MANY_ROWS,
) -> tuple[Variant, ...]:
    """One launch of a function whose programs take a part of a row each: COLUMNS, BLOCK and VECTOR
    are device.row_and_columns', and COUNT says where `dims` counts the rows.

    Args:
        columns: of a row.
        vector_of: the parameter of which a thread loads 16 bytes at once.
        axis: what the rows are, if not the site's.
        few_rows: programs where there are few rows.
    """
    axis = axis or site.rows
    widest = power_of_two(columns)

    def launch_of(programs: Programs) -> Launch:
        block = min(programs.block, widest)
        return site_launch(
            site,
            function,
            constants={
                "COUNT": count_index(axis),
                "COLUMNS": columns,
                "BLOCK": block,
                "VECTOR": vector(site.dtypes[vector_of]),
                **constants,
            },
            programs=Extent(axis, times=-(-columns // block)),
            num_warps=programs.num_warps,
        )

    most = site.limits.max_num_tokens
    many = Variant(work=(launch_of(MANY_ROWS),), max_rows=most)
    if few_rows.block >= min(MANY_ROWS.block, widest) or most <= _FEW_ROWS:
        return (many,)
    return (Variant(work=(launch_of(few_rows),), max_rows=_FEW_ROWS), many)


def by_rows(
    site: Site,
    function: Any,
    *,
    columns: int,
    vector_of: str,
    constants: Mapping[str, int | float | bool | str],
    many_rows: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Variant, ...]:
    """One launch of a function whose programs take a whole row each, and give it SCALES scales,
    SCALE_STRIDE after those of the row before, and blocks of HADAMARD; else as `by_columns`.

    Args:
        many_rows: warps by the elements of a program, where there are rows for all multiprocessors.

    Raises:
        UnsupportedError: as `row_scales`.
    """
    block = row_block(columns)
    most = site.limits.max_num_tokens

    def variant_of(num_warps: int, max_rows: int) -> Variant:
        launch = site_launch(
            site,
            function,
            constants={
                "COUNT": count_index(site.rows),
                "COLUMNS": columns,
                "SCALES": row_scales(site, columns),
                "HADAMARD": int(site.attributes["hadamard"]),
                "SCALE_STRIDE": site.strides["row_scale"],
                "BLOCK": block,
                "VECTOR": vector(site.dtypes[vector_of]),
                **constants,
            },
            programs=Extent(site.rows),
            num_warps=num_warps,
        )
        return Variant(work=(launch,), max_rows=max_rows)

    few, many = row_warps(block), many_rows.get(block, row_warps(block))
    if many == few or most <= _MANY_ROWS:
        return (variant_of(few, most),)
    return (variant_of(few, _MANY_ROWS), variant_of(many, most))


def row_block(columns: int) -> int:
    """Elements of a program that takes a whole row."""
    return max(_MIN_ROW_BLOCK, power_of_two(columns))


def row_warps(block: int) -> int:
    """Of a program that takes a row of `row_block` elements. It decides the order in which a row is
    summed, and so does not depend on the number of rows."""
    return _ROW_WARPS.get(block, _MOST_ROW_WARPS)


def row_scales(site: Site, columns: int) -> int:
    """Scales that a row of the result has of its own; 0: none.

    Raises:
        UnsupportedError: as `scales_of_row`.
    """
    return scales_of_row(columns, site.axes.get("scales", 0))


def scales_of_row(columns: int, count: int) -> int:
    """`count`, if a program can find as many scales of a row of `columns`.

    Raises:
        UnsupportedError: they are of groups that a program cannot tell apart.
    """
    width = columns // max(count, 1)
    if count > 1 and (width * count != columns or width != power_of_two(width)):
        raise UnsupportedError(
            f"{width} channels of {columns} share a scale, and kernels know powers of two",
            field="scales",
        )
    return count


def count_index(axis: str) -> int:
    """Which of `dims` counts the real rows of "tokens", "sequences" or "rows"."""
    return _COUNTS[axis]


def power_of_two(number: int) -> int:
    """The least that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def vector(dtype: str) -> int:
    """Elements of one 16-byte access."""
    return _VECTOR_BYTES * 8 // DTYPES[dtype].bits
