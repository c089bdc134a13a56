"""rms_norm in one launch: a program takes a row at a time, which stays in registers from load to
store."""

from collections.abc import Mapping

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Launch, Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, quantized, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, power_of_two, site_launch, vector

_MIN_BLOCK = 256
_NUM_WARPS: Mapping[int, int] = {256: 1, 512: 2, 1024: 4, 2048: 4, 4096: 8, 8192: 8}
"""By columns, rounded up to a power of two. It decides the order in which a row is summed, and so
does not depend on the number of rows."""
_MOST_WARPS = 16
"""For wider rows."""
_ROWS = ((512, 1), (4096, 2), (1 << 30, 8))
"""Rows of a step up to which a program takes so many: it loads the weight, twice as large as a row
of bf16, once for all of them. Rows of 4096 columns took 8.9 us instead of 10.6 at 2048 rows, 17.6
instead of 20.7 at 4096, and 35 instead of 43 at 8192 between the products of a model (H200)."""


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    bias,
    pre_scale,
    out_scale,
    dims,
    out,
    total,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TOTAL_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`total` is there only with a residual, and then not always."""
    launch_dependents(OVERLAPS)
    first = tl.program_id(0).to(tl.int64) * ROWS
    num_rows = tl.load(dims + COUNT)
    column = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    inside = column < COLUMNS
    factor = tl.load(weight + column, mask=inside, other=0.0)
    offset = None if bias is None else tl.load(bias + column, mask=inside, other=0.0)
    by_column = None if pre_scale is None else tl.load(pre_scale + column, mask=inside, other=1.0)
    by = None if out_scale is None else tl.load(out_scale)
    wait_for_inputs(OVERLAPS)
    for at in range(ROWS):
        row = first + at
        if row < num_rows:
            values = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
            if residual is not None:
                more = tl.load(residual + row * RESIDUAL_STRIDE + column, mask=inside, other=0.0)
                rounded = (values + more.to(tl.float32)).to(x.dtype.element_ty)
                values = rounded.to(tl.float32)
                if total is not None:
                    tl.store(total + row * TOTAL_STRIDE + column, rounded, mask=inside)
            if CENTERED:
                mean = tl.div_rn(tl.sum(values), COLUMNS * 1.0)
                values = tl.where(inside, values - mean, 0.0)
            mean_square = tl.div_rn(tl.sum(values * values), COLUMNS * 1.0)
            scale = tl.div_rn(1.0, tl.sqrt_rn(mean_square + EPS))
            normed = values * scale * factor
            if offset is not None:
                normed += offset
            result = quantized(normed, by_column, by, x.dtype.element_ty, out.dtype.element_ty)
            tl.store(out + row * OUT_STRIDE + column, result, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    most = site.limits.max_num_tokens
    variants = []
    for up_to, rows in _ROWS:
        variants.append(Variant(work=(_launch(site, rows),), max_rows=min(up_to, most)))
        if up_to >= most:
            break
    return tuple(variants)


def _launch(site: Site, rows: int) -> Launch:
    columns = site.axes["K"]
    block = max(_MIN_BLOCK, power_of_two(columns))
    return site_launch(
        site,
        rms_norm,
        constants={
            "COUNT": count_index(site.rows),
            "COLUMNS": columns,
            "X_STRIDE": site.strides["x"],
            "RESIDUAL_STRIDE": site.strides.get("residual", 0),
            "OUT_STRIDE": site.strides["out"],
            "TOTAL_STRIDE": site.strides.get("total", 0),
            "EPS": float(site.attributes["eps"]),
            "CENTERED": bool(site.attributes["centered"]),
            "BLOCK": block,
            "VECTOR": vector(site.dtypes["x"]),
            "ROWS": rows,
        },
        programs=Extent(site.rows, block=rows),
        num_warps=_NUM_WARPS.get(block, _MOST_WARPS),
    )
