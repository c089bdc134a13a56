"""gather_columns in one launch: each program takes some columns of a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, row_and_columns, wait_for_inputs
from trtc.plugins.gpu.triton_launch import by_columns


@triton.jit
def gather_columns(
    x,
    columns,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    is_real = row < tl.load(dims + COUNT)
    source = tl.load(columns + column, mask=inside, other=0)
    wait_for_inputs(OVERLAPS)
    if is_real:
        values = tl.load(x + row * X_STRIDE + source, mask=inside)
        tl.store(out + row * OUT_STRIDE + column, values, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    return by_columns(
        site,
        gather_columns,
        columns=site.axes["N"],
        vector_of="out",
        constants={
            "X_STRIDE": site.strides["x"],
            "OUT_STRIDE": site.strides["out"],
        },
    )
