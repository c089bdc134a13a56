"""Packed weights: the byte order that every CPU kernel reads, whatever the instruction set.

A weight [N, K] is cut into panels of 16 output columns (rows of the array), each contiguous. A
panel is a sequence of 64-byte blocks, one 4-byte cell a column, and a block covers as many k as
fit:

    weight   k a block   cell of column c at k
    f32      1           w[k]
    bf16     2           w[k] w[k+1]
    f8e4m3   4           w[k] w[k+2] w[k+1] w[k+3]
    i8       4           the same, each plus 128 (unsigned)
    i4, u4   8           low nibbles like i8 at k, high nibbles like i8 at k+4; i4 plus 8
    f4e2m1   8           its bits as u4
    iq4      8           its codes as u4
    i6       16          three blocks, see below

The 0 2 1 3 order lets even bytes and odd bytes of a block widen in place to the bf16 pairs
(k, k+1) and (k+2, k+3), and integer dot products do not mind it. Signed weights are stored
with an offset because x86's `vpdpbusd` multiplies unsigned by signed bytes and can broadcast only
the signed operand from memory, which is the activation; kernels take the offset back through the
sum of the activations. Missing columns and k are zeros.

A block of i6 (plugins/six_bits.py) is three of 64 bytes. Codes are 32 more than the weights. The
low four bits of k to k+7 and of k+8 to k+15 are two blocks like those of i4. In the third, a byte
has the high two bits of four codes, of k in its lowest bits, then of k+4, k+8 and k+12; bytes are
in the order of i8.

The layout `planes` is for an int8 lm_head of which only the largest logits are needed, with
magnitudes of at most MOST_IN_PLANES:
two i4 weights, each packed as above, of which w = 16 * coarse + fine. The first alone says which
sums cannot be the largest.

The scales and zero points [N, G] of a packed weight keep their shape, but each panel's are
transposed: [G, 16] panel after panel, the last with as many columns as it has.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.plugins.six_bits import LEAST, MOST
from trtc.protos.errors import CheckpointError

Array = NDArray[Any]

WEIGHTS: Mapping[str, tuple[str, ...]] = {"linear": ("weight",), "moe": ("gate_up", "down")}
"""Operators with an attribute `layout` -> the weights that it is the order of, this one or another.
Their scales and zero points of groups, <weight>_scale and <weight>_zero, lie as they do."""
PANEL = 16
"""Output columns a panel."""
BLOCK = 64
"""Bytes of a block."""
BLOCK_DEPTH = {
    "f32": 1,
    "bf16": 2,
    "f8e4m3": 4,
    "f4e2m1": 8,
    "i8": 4,
    "i6": 16,
    "i4": 8,
    "u4": 8,
    "iq4": 8,
}
"""k a block, by weight type."""
_CELL_ORDER = (0, 2, 1, 3)
MOST_IN_PLANES = 119
"""Magnitude of int8 weights that two signed nibbles, of 16 and of 1, make up."""


def packed_bytes(num_columns: int, depth: int, dtype: str) -> int:
    """Size of a packed [num_columns, depth] weight: a multiple of 64."""
    blocks = -(-depth // BLOCK_DEPTH[dtype])
    return -(-num_columns // PANEL) * blocks * _lines(dtype) * BLOCK


def pack(weight: Array, dtype: str) -> Array:
    """Pack [N, K], or [E, N, K] expert after expert, into bytes.

    Args:
        weight: of the numpy type of `dtype` (4-bit values one an element).

    Raises:
        CheckpointError: an E4M3 weight holds NaN, which the kernels' expansion would make 480.
    """
    assert weight.dtype == _element(dtype), (weight.dtype, dtype)
    if weight.ndim == 3:
        return np.concatenate([pack(expert, dtype) for expert in weight])
    if dtype == "f8e4m3" and bool(np.any((weight.view(np.uint8) & 0x7F) == 0x7F)):
        raise CheckpointError("an E4M3 weight holds NaN", remedy="Quantise the checkpoint again")
    num_columns, depth = weight.shape
    block_depth = BLOCK_DEPTH[dtype]
    panels, blocks = -(-num_columns // PANEL), -(-depth // block_depth)
    padded = np.zeros((panels * PANEL, blocks * block_depth), _code_dtype(dtype))
    padded[:num_columns, :depth] = weight.view(padded.dtype) if _is_float(dtype) else weight
    cells = _encode(padded, dtype).view(np.uint8).reshape(panels, PANEL, blocks, _lines(dtype), -1)
    return np.ascontiguousarray(cells.transpose(0, 2, 3, 1, 4)).reshape(-1)


def pack_planes(weight: Array) -> Array:
    """The bytes of an int8 weight [N, K] in layout planes; K is a multiple of 8.

    Raises:
        AssertionError: a magnitude is above MOST_IN_PLANES.
    """
    codes = weight.astype(np.int16)
    assert weight.shape[1] % BLOCK_DEPTH["i4"] == 0, weight.shape
    assert int(np.abs(codes).max(initial=0)) <= MOST_IN_PLANES
    coarse = (codes + 8) >> 4
    planes = (coarse, codes - 16 * coarse)
    return np.concatenate([pack(plane.astype(NUMPY_DTYPES["i4"]), "i4") for plane in planes])


def unpack_planes(packed: Array, num_columns: int, depth: int) -> Array:
    """The [num_columns, depth] int8 weight that `pack_planes` was given."""
    planes = packed.view(np.uint8).reshape(2, -1)
    coarse, fine = (unpack(plane, num_columns, depth, "i4").astype(np.int8) for plane in planes)
    return 16 * coarse + fine


def unpack(packed: Array, num_columns: int, depth: int, dtype: str) -> Array:
    """The [num_columns, depth] weight that `pack` was given."""
    panels = -(-num_columns // PANEL)
    cells = packed.view(np.uint8).reshape(panels, -1, _lines(dtype), PANEL, BLOCK // PANEL)
    rows = np.ascontiguousarray(cells.transpose(0, 3, 1, 2, 4)).reshape(panels * PANEL, -1)
    values = np.ascontiguousarray(_decode(rows, dtype)[:num_columns, :depth])
    target = _element(dtype)
    if _is_float(dtype):
        return values.astype(_code_dtype(dtype)).view(target)
    return values.astype(target)


def unpack_experts(packed: Array, experts: int, num_columns: int, depth: int, dtype: str) -> Array:
    """The [experts, num_columns, depth] weight that `pack` was given."""
    parts = packed.reshape(experts, -1)
    return np.stack([unpack(part, num_columns, depth, dtype) for part in parts])


def pack_columns(values: Array) -> Array:
    """Scales or zero points [N, G], or [E, N, G], in the order in which panels are read."""
    if values.ndim == 3:
        return np.stack([pack_columns(expert) for expert in values])
    panels = [values[begin : begin + PANEL] for begin in range(0, len(values), PANEL)]
    return np.concatenate([panel.T.reshape(-1) for panel in panels]).reshape(values.shape)


def unpack_columns(packed: Array) -> Array:
    """The [N, G] or [E, N, G] that `pack_columns` was given."""
    if packed.ndim == 3:
        return np.stack([unpack_columns(expert) for expert in packed])
    groups = packed.shape[1]
    panels = [packed[begin : begin + PANEL] for begin in range(0, len(packed), PANEL)]
    return np.concatenate([panel.reshape(groups, -1).T for panel in panels])


def _element(dtype: str) -> np.dtype[Any]:
    """Of a weight of this type that is not packed."""
    return NUMPY_DTYPES[{"iq4": "u4", "i6": "i8"}.get(dtype, dtype)]


def _lines(dtype: str) -> int:
    """Times BLOCK bytes that a block has."""
    return 3 if dtype == "i6" else 1


def _is_float(dtype: str) -> bool:
    return dtype in ("f32", "bf16", "f8e4m3", "f4e2m1")


def _code_dtype(dtype: str) -> np.dtype[Any]:
    """Floating-point weights are moved as bits, integers as values."""
    bits = {"f32": np.uint32, "bf16": np.uint16, "f8e4m3": np.uint8, "f4e2m1": np.uint8}
    return np.dtype(bits.get(dtype, np.int16))


def _encode(codes: Array, dtype: str) -> Array:
    """[rows, k] codes -> [rows, bytes] in cell order (bytes of one column after another)."""
    if dtype in ("f32", "bf16"):
        return codes.view(np.uint8)
    if dtype == "f8e4m3":
        return _reorder(codes)
    if dtype == "i8":
        return _reorder((codes + 128).astype(np.uint8))
    if dtype == "i6":
        return _encode_six(codes)
    nibbles = (codes + (8 if dtype == "i4" else 0)).astype(np.uint8)
    halves = nibbles.reshape(len(nibbles), -1, 2, 4)[..., _CELL_ORDER]
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(nibbles), -1)


def _decode(rows: Array, dtype: str) -> Array:
    """The inverse of `_encode`."""
    if dtype in ("f32", "bf16"):
        return rows.view(_code_dtype(dtype))
    if dtype == "f8e4m3":
        return _reorder(rows)
    if dtype == "i8":
        return _reorder(rows).astype(np.int16) - 128
    if dtype == "i6":
        return _decode_six(rows)
    cells = rows.reshape(len(rows), -1, 1, 4)
    halves = np.concatenate((cells & 15, cells >> 4), axis=2)[..., _CELL_ORDER]
    return halves.reshape(len(rows), -1).astype(np.int16) - (8 if dtype == "i4" else 0)


def _encode_six(codes: Array) -> Array:
    """[rows, k] -> [rows, bytes]: of each block the lines of a column after one another."""
    assert int(codes.min(initial=0)) >= LEAST and int(codes.max(initial=0)) <= MOST
    offset = (codes - LEAST).astype(np.uint8).reshape(len(codes), -1, 4, 4)[..., _CELL_ORDER]
    low, high = offset & 15, offset >> 4
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    lines = (low[:, :, 0] | low[:, :, 1] << 4, low[:, :, 2] | low[:, :, 3] << 4, pairs)
    return np.stack(lines, axis=2).reshape(len(codes), -1)


def _decode_six(rows: Array) -> Array:
    """The inverse of `_encode_six`."""
    first, second, pairs = np.moveaxis(rows.reshape(len(rows), -1, 3, 4), 2, 0)
    low = np.stack((first & 15, first >> 4, second & 15, second >> 4), axis=2)
    high = np.stack([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes: Array = (low | high << 4)[..., _CELL_ORDER].reshape(len(rows), -1).astype(np.int16)
    return codes + np.int16(LEAST)


def _reorder(rows: Array) -> Array:
    """Swap the middle two of every four: its own inverse."""
    return rows.reshape(len(rows), -1, 4)[..., _CELL_ORDER].reshape(len(rows), -1)
