"""Keys and values in codes of 4 bits, two a byte, for references: kernels give the same bits.

The first of two is in the low half of a byte; n stands for (n - 8) * scale. The scale of a head is
its number of largest magnitude / -8, so that this one is exact, whatever its sign. Keys are turned
by a Hadamard matrix before (plugins/hadamard.py).
"""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import LEAST_MAGNITUDE

Floats = NDArray[np.float32]


def hadamard_block(head_dim: int) -> int:
    """Channels that a Hadamard matrix turns together: the largest power of two in head_dim."""
    return head_dim & -head_dim


def signed_scales(rows: Floats) -> Floats:
    """[M, K] -> [M]: -8 of a row's units are its largest magnitude; of two with different signs the
    positive one."""
    highest, lowest = rows.max(axis=-1), rows.min(axis=-1)
    largest = np.where(highest >= -lowest, highest, lowest)
    floored = np.where(np.abs(largest) < LEAST_MAGNITUDE, LEAST_MAGNITUDE, largest)
    return floored.astype(np.float32) / np.float32(-8)


def packed(units: Floats) -> NDArray[np.uint8]:
    """[..., K] numbers as codes, rounded to nearest even and saturated, in [..., K / 2] bytes."""
    codes = (np.clip(np.rint(units), -8, 7) + 8).astype(np.uint8)
    pairs: NDArray[np.uint8] = np.bitwise_or(codes[..., 0::2], codes[..., 1::2] << 4)
    return pairs


def unpacked(codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    """What `packed` rounded to: [..., K / 2] -> [..., K]."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - np.int8(8)
    return pairs.reshape(*codes.shape[:-1], -1)
