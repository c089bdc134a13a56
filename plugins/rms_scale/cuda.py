"""rms_scale in one launch: each program takes some columns of a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, row_and_columns, wait_for_inputs
from trtc.plugins.gpu.triton_launch import by_columns


@triton.jit
def rms_scale(
    x,
    squares,
    weight,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """WIDTH: columns of a whole row, which has the sum of squares."""
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    is_real = row < tl.load(dims + COUNT)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_inputs(OVERLAPS)
    if is_real:
        mean_square = tl.div_rn(tl.load(squares + row * SQUARES_STRIDE), WIDTH * 1.0)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean_square + EPS))
        values = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
        result = (values * scale * factor).to(out.dtype.element_ty)
        tl.store(out + row * OUT_STRIDE + column, result, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    return by_columns(
        site,
        rms_scale,
        columns=site.axes["K"],
        vector_of="x",
        constants={
            "X_STRIDE": site.strides["x"],
            "OUT_STRIDE": site.strides["out"],
            "SQUARES_STRIDE": site.strides["squares"],
            "WIDTH": int(site.attributes["width"]),
            "EPS": float(site.attributes["eps"]),
        },
    )
