"""add in one launch: each program takes some columns of a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, row_and_columns, wait_for_inputs
from trtc.plugins.gpu.triton_launch import by_columns


@triton.jit
def add(
    x,
    y,
    factor,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if row < num_rows:
        one = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(y + row * Y_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
        total = (one + other).to(out.dtype.element_ty)
        if factor is not None:
            total = (total.to(tl.float32) * tl.load(factor)).to(out.dtype.element_ty)
        tl.store(out + row * OUT_STRIDE + column, total, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    return by_columns(
        site,
        add,
        columns=site.axes["K"],
        vector_of="x",
        constants={
            "X_STRIDE": site.strides["x"],
            "Y_STRIDE": site.strides["y"],
            "OUT_STRIDE": site.strides["out"],
        },
    )
