"""The steps of quant/block_steps.py as Triton kernels. A program takes some rows in registers,
[ROWS, COLUMNS]; one column of them is a sum over all under a mask.

`numbers` are those of a grid by halves (CodeGrid.halves), or None where all integers from FIRST to
LAST are numbers, and where numbers are those of E4M3.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import divided
from trtc.quant.code_grid import LARGEST_SCALE, LEAST_SCALE, SCALE_STEPS

_SCALE_STEPS = tl.constexpr(float(SCALE_STEPS))
_LEAST_SCALE, _LARGEST_SCALE = tl.constexpr(LEAST_SCALE), tl.constexpr(LARGEST_SCALE)


@triton.jit
def _whole(values):
    """The nearest integers of numbers below 2^22: the sum has no bits for a fraction."""
    return values + 12582912.0 - 12582912.0


@triton.jit
def _power_of_two(values):
    """The largest that is not above a positive number, or zero."""
    return (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(values, numbers, FIRST: tl.constexpr, LAST: tl.constexpr, IS_E4M3: tl.constexpr):
    """CodeGrid.round."""
    values = tl.minimum(tl.maximum(values, FIRST), LAST)
    if IS_E4M3:
        # Not every GPU converts to E4M3. Its numbers below 2^-6 are as far apart as those above.
        step = tl.maximum(_power_of_two(tl.abs(values)), 0.015625) * 0.125
        result = _whole(values / step) * step
    elif numbers is None:
        result = _whole(values)
    else:
        result = tl.load(numbers + (tl.ceil(values * 2.0) - 2.0 * FIRST).to(tl.int32))
    return result


@triton.jit
def _as_stored(scales, unit, BYTE_SCALES: tl.constexpr):
    """CodeGrid.round_scales."""
    if BYTE_SCALES:
        size = tl.abs(scales) / unit
        size = tl.minimum(tl.maximum(size, _LEAST_SCALE), _LARGEST_SCALE)
        power = _power_of_two(size)
        size = _whole(size / power * _SCALE_STEPS) / _SCALE_STEPS * power * unit
        result = tl.where(scales < 0.0, -size, size)
    else:
        result = scales.to(tl.bfloat16).to(tl.float32)
    return result


@triton.jit
def best_scales(
    groups,
    widest,
    units,
    shares,
    numbers,
    found,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BYTE_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of groups [num_groups, GROUP_SIZE], to `found`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_groups
    at = row.to(tl.int64)[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    values = tl.load(groups + at, mask=inside[:, None], other=0.0)
    result = tl.load(widest + row, mask=inside, other=1.0)
    unit = tl.load(units + row, mask=inside, other=1.0)
    without_clipping, least = result, tl.full((ROWS,), float("inf"), tl.float32)
    for at_share in range(SHARES):
        scale = _as_stored(without_clipping * tl.load(shares + at_share), unit, BYTE_SCALES)
        code = _nearest(divided(values, scale[:, None]), numbers, FIRST, LAST, IS_E4M3)
        off = code * scale[:, None] - values
        error = tl.sum(off * off, 1)
        result = tl.where(error < least, scale, result)
        least = tl.minimum(error, least)
    tl.store(found + row, result, mask=inside)


@triton.jit
def round_block(
    block,
    scales,
    upper,
    numbers,
    codes,
    num_rows,
    num_columns,
    block_stride,
    codes_stride,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """BlockSteps.round_block. A column that is done holds its errors."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_rows
    column = tl.arange(0, COLUMNS)
    inside = in_rows[:, None] & (column < num_columns)[None, :]
    at = row.to(tl.int64)[:, None] * block_stride + column[None, :]
    left = tl.load(block + at, mask=inside, other=0.0)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(num_columns):
        here = (column == k)[None, :]
        scale = tl.load(scales + k * num_rows + row, mask=in_rows, other=1.0)
        after = (column > k) & (column < num_columns)
        others = tl.load(upper + k * num_columns + column, mask=after, other=0.0)
        own = tl.sum(tl.where(here, left, 0.0), 1)
        code = _nearest(own / scale, numbers, FIRST, LAST, IS_E4M3)
        error = (own - code * scale) / tl.load(upper + k * num_columns + k)
        left = tl.where(here, error[:, None], left - error[:, None] * others[None, :])
        result = tl.where(here, code[:, None], result)
    tl.store(block + at, left, mask=inside)
    at = row.to(tl.int64)[:, None] * codes_stride + column[None, :]
    tl.store(codes + at, result.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def descend_block(
    codes,
    scales,
    residual,
    gram,
    unit,
    numbers,
    change,
    num_rows,
    num_columns,
    codes_stride,
    scales_stride,
    residual_stride,
    gram_stride,
    GROUP_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BYTE_SCALES: tl.constexpr,
    FIT_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """BlockSteps.descend_block; `change` [num_rows, num_columns]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_rows
    column = tl.arange(0, COLUMNS)
    in_columns = column < num_columns
    inside = in_rows[:, None] & in_columns[None, :]
    line = row.to(tl.int64)[:, None]
    codes_of_row = codes + row.to(tl.int64) * codes_stride
    slopes = tl.load(residual + line * residual_stride + column[None, :], mask=inside, other=0.0)
    code = tl.load(codes + line * codes_stride + column[None, :], mask=inside, other=0)
    code = code.to(tl.float32)
    step = tl.zeros((ROWS, COLUMNS), tl.float32)
    before = tl.zeros((ROWS, COLUMNS), tl.float32)
    own_unit = tl.load(unit)
    for group in range(num_columns // GROUP_SIZE):
        here = (column // GROUP_SIZE == group)[None, :]
        at_scale = scales + row.to(tl.int64) * scales_stride + group
        scale = tl.load(at_scale, mask=in_rows, other=1.0)
        own = tl.where(here, code, 0.0)
        before += own * scale[:, None]
        if FIT_SCALES:
            products = tl.zeros((ROWS, COLUMNS), tl.float32)
            for k in range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE):
                number = tl.load(codes_of_row + k, mask=in_rows, other=0).to(tl.float32)
                others = tl.load(gram + k * gram_stride + column, mask=in_columns, other=0.0)
                products += number[:, None] * others[None, :]
            curvature = tl.sum(own * products, 1)
            slope = tl.sum(own * slopes, 1)
            best = tl.where(curvature > 0.0, scale + slope / curvature, scale)
            better = _as_stored(best, own_unit, BYTE_SCALES) - scale
            # A rounded scale may be worse than what is there, and none may become zero.
            gain = 2.0 * better * slope - better * better * curvature
            better = tl.where((gain > 0.0) & (scale + better != 0.0), better, 0.0)
            slopes -= products * better[:, None]
            scale += better
        step = tl.where(here, scale[:, None], step)
    for group in range(num_columns // GROUP_SIZE):
        first = group * GROUP_SIZE
        scale = tl.sum(tl.where((column == first)[None, :], step, 0.0), 1)
        for k in range(first, first + GROUP_SIZE):
            here = (column == k)[None, :]
            number = tl.load(codes_of_row + k, mask=in_rows, other=0).to(tl.float32)
            others = tl.load(gram + k * gram_stride + column, mask=in_columns, other=0.0)
            slope = tl.sum(tl.where(here, slopes, 0.0), 1)
            curvature = tl.load(gram + k * gram_stride + k) * scale
            best = _nearest(number + slope / curvature, numbers, FIRST, LAST, IS_E4M3)
            slopes += ((number - best) * scale)[:, None] * others[None, :]
            code = tl.where(here, best[:, None], code)
    tl.store(change + line * num_columns + column[None, :], before - code * step, mask=inside)
    tl.store(
        codes + line * codes_stride + column[None, :], code.to(codes.dtype.element_ty), mask=inside
    )
    first_of_group = inside & (column % GROUP_SIZE == 0)[None, :]
    at = scales + line * scales_stride + (column // GROUP_SIZE)[None, :]
    tl.store(at, step, mask=first_of_group)
