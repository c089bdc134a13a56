"""quantize in one launch: each program takes some columns of a row, or the row where scales follow
from it."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import (
    launch_dependents,
    quantized,
    quantized_rows,
    row_and_columns,
    scaled_to,
    wait_for_inputs,
)
from trtc.plugins.gpu.triton_launch import by_columns, by_rows
from trtc.protos.errors import UnsupportedError


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


@triton.jit
def quantize_rows(
    x,
    pre_scale,
    dims,
    out,
    row_scale,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    HADAMARD: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
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
    wait_for_inputs(OVERLAPS)
    if row < num_rows:
        THROUGH: tl.constexpr = x.dtype.element_ty
        values = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
        codes = quantized_rows(
            scaled_to(values, by_column, THROUGH), row_scale + row * SCALE_STRIDE,
            COLUMNS, SCALES, HADAMARD, BLOCK, out.dtype.element_ty,
        )  # fmt: skip
        tl.store(out + row * OUT_STRIDE + column, codes, mask=inside)


_MANY_ROWS = {4096: 4, 8192: 4, 16384: 4}
"""Warps by the elements of a row of bf16 that one scale is for: 8,192 rows of 14,336 took 95
microseconds, with 8 to 32 warps 138 to 145; of 4,096 25.7, with 8 warps 26.7 (H200)."""


def lower(site: Site) -> tuple[Variant, ...]:
    """Variants by ascending rows.

    Raises:
        UnsupportedError: codes that are dequantised, which CPU engines alone have; groups that a
            program cannot tell apart.
    """
    constants = {"X_STRIDE": site.strides["x"], "OUT_STRIDE": site.strides["out"]}
    columns = site.axes["K"]
    if site.attributes["codes"] != "none":
        raise UnsupportedError("kernels for a GPU do not dequantise codes", field="codes")
    if site.has("row_scale"):
        has_one_scale = site.axes["scales"] == 1 and not site.attributes["hadamard"]
        return by_rows(
            site,
            quantize_rows,
            columns=columns,
            vector_of="x",
            constants=constants,
            many_rows=_MANY_ROWS if has_one_scale and site.dtypes["x"] == "bf16" else {},
        )
    return by_columns(site, quantize, columns=columns, vector_of="x", constants=constants)
