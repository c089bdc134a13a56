"""The layout `compact`: bf16 weights in 12 bits each, for steps that are bound by memory bandwidth.

The exponents of a column's weights lie close together. Divided by a power of two that brings the
largest of a column (a row of the array [N, K]) into [1, 2), a weight's magnitude is kept as it is
from 2^-13 up, and is otherwise rounded to 0 or 2^-13: an error of at most 2^-14 of the column's
largest weight, where bf16 itself has rounded that one by up to 2^-9. Of normally distributed
weights it is one in 4,000. The high byte of such a bf16 number, its sign and all but the last bit
of its exponent, has 16 values: zero and seven pairs of exponents, of either sign. A nibble says
which; the low byte stays.

As in plugins/layouts.py panels are of 16 columns and missing columns and k are zeros. A block is of
8 k in 192 bytes: 64 low bytes for k to k+3, 64 for k+4 to k+7, and 64 whose low nibbles belong to
the first 64 bytes and whose high nibbles to the second. In each 64 the byte of column c and the
i-th k is

    c / 4 * 16  +  i / 2 * 8  +  c % 4 * 2  +  i % 2

so that two bytewise interleavings of 16-byte lanes, as x86 has them, give the pairs (k, k+1) and
(k+2, k+3) of 16 columns.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.layouts import PANEL
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.errors import CheckpointError

Array = NDArray[Any]

BLOCK = 192
"""Bytes of a block."""
BLOCK_DEPTH = 8
"""k a block."""
SMALLEST = 2.0**-13
"""The least magnitude but 0 of weights whose column has its largest in [1, 2)."""
_FIRST_HIGH = 0x38
"""The high byte of nibble 1 is one more, of nibble 7 that of 1 to 2."""
_ONE = 127
"""The exponent's bits of a bf16 number in [1, 2)."""
_LEAST = 114
"""Those of SMALLEST."""
_SLICE = 1 << 10
"""Panels that are packed at a time: an lm_head's bits are not held several times over."""


def compact_bytes(num_columns: int, depth: int) -> int:
    """Size of a packed [num_columns, depth] weight."""
    return -(-num_columns // PANEL) * -(-depth // BLOCK_DEPTH) * BLOCK


def compact_scales(weight: Array) -> Array:
    """What the packed values of a bf16 weight [..., K] are multiples of: powers of two, [..., 1].

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    tops = _top_exponents(weight.view(np.uint16))
    if np.any(tops == 0xFF):
        raise CheckpointError("a weight holds NaN or infinity", remedy="Save the checkpoint again")
    return (tops.astype(np.uint32) << 23).view(np.float32)


def pack_compact(weight: Array) -> Array:
    """The bytes of a bf16 weight [N, K], or [E, N, K] expert after expert, over its scales."""
    if weight.ndim == 3:
        return np.concatenate([pack_compact(expert) for expert in weight])
    assert weight.dtype == NUMPY_DTYPES["bf16"], weight.dtype
    packed = np.empty((-(-len(weight) // PANEL), compact_bytes(PANEL, weight.shape[1])), np.uint8)
    for first in range(0, len(packed), _SLICE):
        last = min(first + _SLICE, len(packed))
        packed[first:last] = _pack_panels(weight[first * PANEL : last * PANEL])
    return packed.reshape(-1)


def unpack_compact(packed: Array, num_columns: int, depth: int) -> Array:
    """The bf16 weight [num_columns, depth] over its scales that `pack_compact` stored."""
    panels = -(-num_columns // PANEL)
    blocks = packed.view(np.uint8).reshape(panels, -1, 3, BLOCK // 3)
    nibbles = np.stack((blocks[:, :, 2] & 15, blocks[:, :, 2] >> 4), axis=2)
    bits = blocks[:, :, :2].astype(np.uint16) | (_high_bytes(nibbles).astype(np.uint16) << 8)
    lanes = bits.reshape(panels, -1, 2, PANEL // 4, 2, 4, 2)
    rows = np.ascontiguousarray(lanes.transpose(0, 3, 5, 1, 2, 4, 6)).reshape(panels * PANEL, -1)
    values = np.ascontiguousarray(rows[:num_columns, :depth])
    return values.view(NUMPY_DTYPES["bf16"])


def unpack_compact_experts(packed: Array, experts: int, num_columns: int, depth: int) -> Array:
    """The [experts, num_columns, depth] over its scales that `pack_compact` stored."""
    parts = packed.reshape(experts, -1)
    return np.stack([unpack_compact(part, num_columns, depth) for part in parts])


def _pack_panels(weight: Array) -> Array:
    """[panels, bytes of a panel]."""
    num_columns, depth = weight.shape
    panels, blocks = -(-num_columns // PANEL), -(-depth // BLOCK_DEPTH)
    bits = np.zeros((panels * PANEL, blocks * BLOCK_DEPTH), np.uint16)
    bits[:num_columns, :depth] = _in_window(weight.view(np.uint16))
    lanes = bits.reshape(panels, PANEL // 4, 4, blocks, 2, 2, 2).transpose(0, 3, 4, 1, 5, 2, 6)
    ordered = np.ascontiguousarray(lanes).reshape(panels, blocks, 2, BLOCK // 3)
    nibbles = _nibbles((ordered >> 8).astype(np.uint8))
    joined = nibbles[:, :, :1] | (nibbles[:, :, 1:] << 4)
    return np.concatenate((ordered.astype(np.uint8), joined), axis=2).reshape(panels, -1)


def _in_window(bits: Array) -> Array:
    """The bits of bf16 numbers [N, K] over their scales, in numbers that have a nibble."""
    shift = _ONE - _top_exponents(bits).astype(np.int16)
    exponents = ((bits >> 7) & 0xFF).astype(np.int16)
    moved = np.where(exponents, exponents + shift, 0)
    sign = bits & 0x8000
    small = np.where(moved == _LEAST - 1, np.uint16(_LEAST << 7), np.uint16(0))
    kept = (bits & 0x7F) | (moved.astype(np.uint16) << 7)
    found: Array = sign | np.where(moved >= _LEAST, kept, small)
    return found


def _top_exponents(bits: Array) -> Array:
    """The exponent's bits of the largest magnitude of each row, at least 1."""
    largest = np.max(bits & 0x7FFF, axis=-1, keepdims=True)
    tops: Array = np.maximum(largest >> 7, 1).astype(np.uint16)
    return tops


def _nibbles(high: Array) -> Array:
    magnitude = high & 0x7F
    codes = np.where(magnitude, magnitude - np.uint8(_FIRST_HIGH), np.uint8(0))
    assert int(codes.max(initial=0)) < 8
    nibbles: Array = codes | (high >> 7 << 3)
    return nibbles


def _high_bytes(nibbles: Array) -> Array:
    codes = nibbles & 7
    magnitude = np.where(codes, codes + np.uint8(_FIRST_HIGH), np.uint8(0))
    high: Array = magnitude | (nibbles >> 3 << 7)
    return high
