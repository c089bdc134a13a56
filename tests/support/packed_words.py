"""Words of 32 bits that hold small codes, one bit after the other."""

import numpy as np
from numpy.typing import NDArray


def pack_words(codes: NDArray[np.uint8], bits: int, axis: int) -> NDArray[np.int32]:
    """Code i along `axis` has bits `bits` * i and on of all words after one another.

    The codes along `axis` must fill whole words.
    """
    moved = np.moveaxis(codes, axis, -1)
    each = np.unpackbits(moved[..., None], axis=-1, count=bits, bitorder="little")
    packed = np.packbits(each.reshape(*moved.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(np.moveaxis(packed.view("<i4"), -1, axis))
