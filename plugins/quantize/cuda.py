"""quantize in one launch: each program takes some columns of a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, quantized, row_and_columns, wait_for_inputs
from trtc.plugins.gpu.triton_launch import by_columns


@triton.jit
def quantize(
    x,
    pre_scale,
    out_scale,
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
    num_rows = tl.load(dims + COUNT)
    by_column = None if pre_scale is None else tl.load(pre_scale + column, mask=inside, other=1.0)
    by = None if out_scale is None else tl.load(out_scale)
    wait_for_inputs(OVERLAPS)
    if row < num_rows:
        values = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
        result = quantized(values, by_column, by, x.dtype.element_ty, out.dtype.element_ty)
        tl.store(out + row * OUT_STRIDE + column, result, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    return by_columns(
        site,
        quantize,
        columns=site.axes["K"],
        vector_of="x",
        constants={
            "X_STRIDE": site.strides["x"],
            "OUT_STRIDE": site.strides["out"],
        },
    )
