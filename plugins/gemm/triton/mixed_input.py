"""Triton kernels of mixed-input GEMMs; mixed_input.py says when each is used."""

import triton
import triton.language as tl

from trtc.plugins.gemm.triton.weights import (
    group_scales,
    group_values,
    product,
    weight_tile,
)
from trtc.plugins.gpu.triton import launch_dependents, softcapped, wait_for_inputs


@triton.jit
def multiply_mixed_input(
    x,
    weight,
    weight_scale,
    weight_zero,
    scale_unit,
    input_scale,
    bias,
    residual,
    row_scale,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NIBBLES: tl.constexpr,
    SIGNED: tl.constexpr,
    TILES: tl.constexpr,
    E2M1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """SCALES: of a row of x, in row_scale; more than one are of the weight's groups. E2M1: as of
    `product`."""
    launch_dependents(OVERLAPS)
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    if tl.program_id(0) * BLOCK_M < num_rows:
        OPERAND: tl.constexpr = x.dtype.element_ty
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = n < COLUMNS
        # Columns after the last are computed as the last.
        column = tl.minimum(n, COLUMNS - 1).to(tl.int64)
        x_scales = None
        if SCALES > 1:
            x_scales = row_scale + row.to(tl.int64) * SCALE_STRIDE
        total = product(
            x + row.to(tl.int64) * X_STRIDE, is_row, weight, weight_scale, weight_zero, column,
            DEPTH, GROUP, NIBBLES, SIGNED, TILES, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            E2M1, x_scales,
        )  # fmt: skip
        if scale_unit is not None:
            total = total * tl.load(scale_unit + column)[None, :]
        if input_scale is not None:
            total = total * tl.load(input_scale)
        if SCALES == 1:
            scales = row_scale + row.to(tl.int64) * SCALE_STRIDE
            total = total * tl.load(scales, mask=is_row, other=0.0)[:, None]
        if bias is not None:
            total = total + tl.load(bias + column)[None, :]
        if SOFTCAP > 0:
            total = softcapped(total, SOFTCAP)
        inside = is_row[:, None] & is_column[None, :]
        at = row.to(tl.int64)[:, None]
        if residual is not None:
            others = residual + at * RESIDUAL_STRIDE + column[None, :]
            total = total + tl.load(others, mask=inside, other=0.0).to(tl.float32)
        results = out + at * OUT_STRIDE + column[None, :]
        tl.store(results, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def widen_weight(
    weight,
    weight_scale,
    weight_zero,
    scale_unit,
    wide_weight,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    SIGNED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """wide_weight [COLUMNS, DEPTH] bf16: what x as bf16 is multiplied with."""
    launch_dependents(OVERLAPS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * BLOCK_K
    column = tl.minimum(n, COLUMNS - 1).to(tl.int64)
    zeros = None
    if weight_zero is not None:
        zeros = group_values(weight_zero, column, begin, DEPTH, GROUP, TILES)[:, None]
    tile = weight_tile(
        weight, zeros, column, begin, DEPTH, BLOCK_K, NIBBLES, SIGNED, TILES, tl.bfloat16
    ).to(tl.float32)
    scales = group_scales(weight_scale, column, begin, DEPTH, GROUP, TILES, NIBBLES)
    if scale_unit is not None:
        scales = scales * tl.load(scale_unit + column)
    k = begin + tl.arange(0, BLOCK_K)
    # The product before this one may still read the buffer that this one writes.
    wait_for_inputs(OVERLAPS)
    at = wide_weight + column[:, None] * DEPTH + k[None, :]
    inside = (n < COLUMNS)[:, None] & (k < DEPTH)[None, :]
    tl.store(at, (tile * scales[:, None]).to(tl.bfloat16), mask=inside)
