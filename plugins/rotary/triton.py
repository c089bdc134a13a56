"""Norm and rotary embedding of some heads of a row, for the Triton kernels of rope and
rope_kv_write."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import divided, is_finite, largest_of, quantized, scale_of_head


@triton.jit
def turned(first, second, cosines, sines):
    """Halves of some heads, by the angles of a row."""
    return (
        first * cosines[None, :] - second * sines[None, :],
        second * cosines[None, :] + first * sines[None, :],
    )


@triton.jit
def rotated_heads(
    source,
    norm,
    cos,
    sin,
    head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NORM_AFTER: tl.constexpr,
):
    """Norm and rotation of some heads, [heads, HEAD_PAD] f32 with the bits of `source`'s type and
    zeros beyond HEAD_DIM. `cos` and `sin`: the angles of the row; `norm` may be None.

    As `rotate_heads`, for what needs all of a head at once: each column is loaded beside the one
    that it is turned with.
    """
    THROUGH: tl.constexpr = source.dtype.element_ty
    column = tl.arange(0, HEAD_PAD)
    turns = column < 2 * HALF
    partner = tl.where(turns, tl.where(column < HALF, column + HALF, column - HALF), column)
    inside = (head < NUM_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    first = head[:, None] * HEAD_DIM
    own = tl.load(source + first + column[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + first + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    cosines = tl.load(cos + column % HALF, mask=turns, other=1.0)
    sines = tl.load(sin + column % HALF, mask=turns, other=0.0)
    sines = tl.where(column < HALF, -sines, sines)
    if NORM_AFTER:
        own = (own * cosines[None, :] + other * sines[None, :]).to(THROUGH).to(tl.float32)
    if norm is not None:
        squares = tl.sum(own * own, 1)
        root = tl.sqrt_rn(tl.div_rn(squares, HEAD_DIM * 1.0) + EPS)[:, None]
        weight = tl.load(norm + column, mask=column < HEAD_DIM, other=0.0)[None, :]
        own = (divided(own, root) * weight).to(THROUGH).to(tl.float32)
        weight = tl.load(norm + partner, mask=column < HEAD_DIM, other=0.0)[None, :]
        other = (divided(other, root) * weight).to(THROUGH).to(tl.float32)
    if not NORM_AFTER:
        own = (own * cosines[None, :] + other * sines[None, :]).to(THROUGH).to(tl.float32)
    return own


@triton.jit
def rotate_heads(
    source,
    target,
    norm,
    factor,
    scale,
    scales,
    cosines,
    sines,
    head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NORM_AFTER: tl.constexpr,
):
    """Norm, rotation and quantisation of some heads from `source` to `target`, where the first
    head of the row begins; `norm`, `factor`, `scale` and `scales` may be None. NORM_AFTER: the
    rotation comes first. `factor` multiplies the result before it is divided by `scale`. `scales`:
    where each head's own scale goes, by which it is divided instead."""
    THROUGH: tl.constexpr = source.dtype.element_ty
    OUT: tl.constexpr = target.dtype.element_ty
    column = tl.arange(0, HALF_PAD)
    in_half = column < HALF
    at = head[:, None] * HEAD_DIM + column[None, :]
    inside = (head < NUM_HEADS)[:, None] & in_half[None, :]
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    by = None if scale is None else tl.load(scale)
    if REST_PAD > 0:
        more = tl.arange(0, REST_PAD)
        in_rest = more < HEAD_DIM - 2 * HALF
        at_rest = head[:, None] * HEAD_DIM + 2 * HALF + more[None, :]
        inside_rest = (head < NUM_HEADS)[:, None] & in_rest[None, :]
        rest = tl.load(source + at_rest, mask=inside_rest, other=0.0).to(tl.float32)
    if NORM_AFTER:
        first, second = turned(first, second, cosines, sines)
        first = first.to(THROUGH).to(tl.float32)
        second = second.to(THROUGH).to(tl.float32)
    if norm is not None:
        squares = tl.sum(first * first + second * second, 1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, 1)
        root = tl.sqrt_rn(tl.div_rn(squares, HEAD_DIM * 1.0) + EPS)[:, None]
        by_first = tl.load(norm + column, mask=in_half, other=0.0)[None, :]
        by_second = tl.load(norm + HALF + column, mask=in_half, other=0.0)[None, :]
        first = (divided(first, root) * by_first).to(THROUGH).to(tl.float32)
        second = (divided(second, root) * by_second).to(THROUGH).to(tl.float32)
        if REST_PAD > 0:
            by_rest = tl.load(norm + 2 * HALF + more, mask=in_rest, other=0.0)[None, :]
            rest = (divided(rest, root) * by_rest).to(THROUGH).to(tl.float32)
    if not NORM_AFTER:
        first, second = turned(first, second, cosines, sines)
    if factor is not None:
        first = first.to(THROUGH).to(tl.float32) * factor
        second = second.to(THROUGH).to(tl.float32) * factor
        if REST_PAD > 0:
            rest = rest * factor
    if scales is not None:
        first = first.to(THROUGH).to(tl.float32)
        second = second.to(THROUGH).to(tl.float32)
        largest = tl.maximum(largest_of(first), largest_of(second))
        finite = is_finite(first) & is_finite(second)
        if REST_PAD > 0:
            largest = tl.maximum(largest, largest_of(rest))
            finite = finite & is_finite(rest)
        own = scale_of_head(largest, finite, OUT)
        tl.store(scales + head, own, mask=head < NUM_HEADS)
        by = own[:, None]
    tl.store(target + at, quantized(first, None, by, THROUGH, OUT), mask=inside)
    tl.store(target + at + HALF, quantized(second, None, by, THROUGH, OUT), mask=inside)
    if REST_PAD > 0:
        tl.store(target + at_rest, quantized(rest, None, by, THROUGH, OUT), mask=inside_rest)
