"""The weight type `i6`: integers of 6 bits, and the order in which CUDA kernels read them.

Until it is stored, such a weight is int8 [N, K] with codes from LEAST to MOST. CPU kernels read it
in layout packed (plugins/layouts.py), CUDA kernels in layout split: K is cut into units of 128
channels, and a unit of a row is 96 bytes, three planes of 32. Byte j of each plane is of channels
4 j to 4 j + 3, as codes from 0 to 63, which are 32 more than the weights:

    plane   bits of byte j, low ones first
    0       low four bits of channel 4 j, then of 4 j + 1
    1       low four bits of channel 4 j + 2, then of 4 j + 3
    2       high two bits of channel 4 j, of 4 j + 1, of 4 j + 2, of 4 j + 3

So what a thread loads of the three planes is whole weights.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LEAST, MOST = -32, 31
UNIT = 128
"""Channels."""
_PLANES = 3


def split(weight: Array) -> NDArray[np.uint8]:
    """The bytes of a weight int8 [N, K], or [E, N, K], in layout split.

    Args:
        weight: K is a multiple of UNIT.
    """
    assert weight.shape[-1] % UNIT == 0, weight.shape
    assert int(weight.min(initial=0)) >= LEAST and int(weight.max(initial=0)) <= MOST
    codes = (weight - np.int8(LEAST)).view(np.uint8).reshape(-1, UNIT // 4, 4)
    low, high = codes & 15, codes >> 4
    planes = (
        low[..., 0] | low[..., 1] << 4,
        low[..., 2] | low[..., 3] << 4,
        high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6,
    )
    return np.stack(planes, axis=1).reshape(-1)


def join(packed: Array, *shape: int) -> NDArray[np.int8]:
    """The weight of this shape that `split` was given."""
    first, second, high = np.moveaxis(packed.view(np.uint8).reshape(-1, _PLANES, UNIT // 4), 1, 0)
    low = np.stack((first & 15, first >> 4, second & 15, second >> 4), axis=-1)
    pairs = np.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    codes: NDArray[np.int8] = (low | pairs << 4).view(np.int8) + np.int8(LEAST)
    return codes.reshape(shape)
