"""rms_norm in one launch: a program takes a row at a time, which stays in registers from load to
store."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Launch, Site, Variant
from trtc.plugins.gpu.triton import (
    launch_dependents,
    quantized,
    quantized_rows,
    scaled_to,
    wait_for_inputs,
)
from trtc.plugins.gpu.triton_launch import (
    count_index,
    row_block,
    row_scales,
    row_warps,
    site_launch,
    vector,
)

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
    row_scale,
    normed,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    HADAMARD: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TOTAL_STRIDE: tl.constexpr,
    NORMED_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`total` is there only with a residual, and then not always. SCALES: of a row of out; 0: its
    scale is out_scale."""
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
            values = values * scale * factor
            if offset is not None:
                values += offset
            THROUGH: tl.constexpr = x.dtype.element_ty
            if normed is not None:
                tl.store(normed + row * NORMED_STRIDE + column, values.to(THROUGH), mask=inside)
            if SCALES > 0:
                result = quantized_rows(
                    scaled_to(values, by_column, THROUGH), row_scale + row * SCALE_STRIDE,
                    COLUMNS, SCALES, HADAMARD, BLOCK, out.dtype.element_ty,
                )  # fmt: skip
            else:
                result = quantized(values, by_column, by, THROUGH, out.dtype.element_ty)
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
    block = row_block(columns)
    return site_launch(
        site,
        rms_norm,
        constants={
            "COUNT": count_index(site.rows),
            "COLUMNS": columns,
            "SCALES": row_scales(site, columns),
            "HADAMARD": int(site.attributes["hadamard"]),
            "SCALE_STRIDE": site.strides.get("row_scale", 0),
            "X_STRIDE": site.strides["x"],
            "RESIDUAL_STRIDE": site.strides.get("residual", 0),
            "OUT_STRIDE": site.strides["out"],
            "TOTAL_STRIDE": site.strides.get("total", 0),
            "NORMED_STRIDE": site.strides.get("normed", 0),
            "EPS": float(site.attributes["eps"]),
            "CENTERED": bool(site.attributes["centered"]),
            "BLOCK": block,
            "VECTOR": vector(site.dtypes["x"]),
            "ROWS": rows,
        },
        programs=Extent(site.rows, block=rows),
        num_warps=row_warps(block),
    )
