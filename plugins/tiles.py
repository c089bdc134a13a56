"""Weights in tiles: the order in which the CUDA kernels read 4-bit weights from memory.

A weight [N, K] is cut into tiles of 16 rows and 128 channels. The tiles of 16 rows follow each
other along K, each of them whole, 16 rows of 64 bytes: what a warp reads next is 1 KB in a row.
Scales and zero points [N, G] are cut into 16 rows of one group each, in the same way.

    position in memory   16 rows a tile of rows; then all of K, 128 channels a tile;
                         then the rows of the tile; then its channels, two a byte

Element types and shapes do not change, only the order of the elements.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROWS = 16
CHANNELS = 128
_GROUPS_IN_A_TILE = (32, 64)


def fits(num_columns: int, depth: int, group_size: int) -> bool:
    """Whether a weight [num_columns, depth] falls into whole tiles, and tiles into whole groups."""
    group_fits = group_size in _GROUPS_IN_A_TILE or group_size % CHANNELS == 0
    return num_columns % ROWS == 0 and depth % CHANNELS == 0 and group_fits


def tile(array: Array, width: int) -> Array:
    """[..., N, C] -> the same shape in the order of tiles.

    Args:
        width: columns of a tile: CHANNELS of a weight, 1 of its scales and zero points.
    """
    *outer, rows, columns = array.shape
    cut = array.reshape(*outer, rows // ROWS, ROWS, columns // width, width)
    return np.ascontiguousarray(np.swapaxes(cut, -3, -2)).reshape(array.shape)


def untile(array: Array, width: int) -> Array:
    """The array that `tile` was given."""
    *outer, rows, columns = array.shape
    cut = array.reshape(*outer, rows // ROWS, columns // width, ROWS, width)
    return np.ascontiguousarray(np.swapaxes(cut, -3, -2)).reshape(array.shape)


def untile_groups(values: Array | None) -> Array | None:
    """Scales or zero points that `tile` was given; None: there are none."""
    return None if values is None else untile(values, 1)
