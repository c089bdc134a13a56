"""Philox4x32-10: random numbers as a pure function of a key and a counter.

J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. GPU samplers use the
same generator, so that a seed gives the same random numbers on every target.
"""

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counters: UInt64s, keys: UInt64s) -> UInt64s:
    """Ten rounds of Philox4x32.

    Args:
        counters: [R, 4] 32-bit words.
        keys: [R, 2] 32-bit words.

    Returns:
        [R, 4] 32-bit words.
    """
    c0, c1, c2, c3 = (counters[:, word] for word in range(4))
    k0, k1 = keys[:, 0], keys[:, 1]
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: UInt64s, sequences: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[R] numbers in [0, 1) with 53 random bits, one for each (seed, sequence, position)."""
    keys = np.stack((seeds & _LOW, seeds >> _HALF), axis=1)
    zeros = np.zeros_like(seeds)
    counters = np.stack(
        (positions.astype(np.uint64), sequences.astype(np.uint64), zeros, zeros), axis=1
    )
    words = philox4x32(counters, keys)
    bits = (words[:, 0] << _HALF | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
