"""Keys and values in codes of 4 bits, two a byte, for references: kernels give the same bits.

The first of two is in the low half of a byte; n stands for (n - 8) * scale. The scale of a head is
its number of largest magnitude / -8, so that this one is exact, whatever its sign. Keys are turned
by `hadamard` before, which spreads channels that are much larger than others over all of them.
"""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import LEAST_MAGNITUDE

Floats = NDArray[np.float32]


def hadamard_block(head_dim: int) -> int:
    """Channels that a Hadamard matrix turns together: the largest power of two in head_dim."""
    return head_dim & -head_dim


def hadamard(heads: Floats) -> Floats:
    """[..., head_dim] times the matrix of +-1, in blocks; twice is hadamard_block times `heads`.

    A sum of four is (a + c) + (b + d), in f32: kernels add in the same order.
    """
    shape, block = heads.shape, hadamard_block(heads.shape[-1])
    half = block // 2
    while half:
        pairs = heads.reshape(-1, 2, half)
        one, other = pairs[:, 0], pairs[:, 1]
        heads = np.stack([one + other, one - other], axis=1).reshape(shape)
        half //= 2
    return heads


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
