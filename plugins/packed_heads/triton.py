"""Heads of a cache in codes of 4 bits, two a byte, in Triton: plugins/four_bits.py's, to the same
bits."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import divided, hadamard


@triton.jit
def store_packed(
    rows, finite, codes, scales, head, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Rounds f32 heads [R, W], zeros beyond HEAD_DIM, to `codes` and `scales`, where the first head
    of their row begins. A head that is not `finite` has the scale NaN."""
    HEIGHT: tl.constexpr = rows.shape[0]
    PAIRS: tl.constexpr = rows.shape[1] // 2
    highest = tl.max(rows, 1)
    lowest = tl.min(rows, 1)
    largest = tl.where(highest >= -lowest, highest, lowest)
    scale = tl.where(tl.abs(largest) < 1e-10, 1e-10, largest) * -0.125
    tl.store(scales + head, tl.where(finite, scale, float("nan")), mask=head < NUM_HEADS)
    units = tl.clamp(divided(rows, scale[:, None]), -8.0, 7.0)
    # Adding 1.5 * 2^23 leaves no bits for a fraction.
    numbers = (units + 12582912.0 - 12582912.0).to(tl.int32) + 8
    low, high = tl.split(tl.reshape(numbers, HEIGHT, PAIRS, 2))
    column = tl.arange(0, PAIRS)
    inside = (head < NUM_HEADS)[:, None] & (column < HEAD_DIM // 2)[None, :]
    at = head[:, None] * (HEAD_DIM // 2) + column[None, :]
    tl.store(codes + at, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), mask=inside)


@triton.jit
def unpacked(codes, DTYPE: tl.constexpr):
    """[R, W / 2] bytes -> what they stand for, [R, W] in units of a head's scale."""
    HEIGHT: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = 2 * codes.shape[1]
    low = ((codes & 15).to(tl.int32) - 8).to(tl.float32)
    high = ((codes >> 4).to(tl.int32) - 8).to(tl.float32)
    return tl.reshape(tl.join(low, high), HEIGHT, WIDTH).to(DTYPE)


@triton.jit
def turned_queries(queries, BLOCK: tl.constexpr):
    """Queries [R, W] as they are multiplied by packed keys, rounded to their own type."""
    turned = hadamard(queries.to(tl.float32), BLOCK)
    return (turned * (1.0 / BLOCK)).to(queries.dtype)
