"""The weight type `iq4`: 4-bit codes of 16 numbers that lie closer together near zero.

Weights of a group are distributed about normally, and evenly spaced codes waste those far from
zero. A weight is VALUES[code] * its group's scale. Scales have either sign: the numbers reach
further below zero than above it, and a group's largest weight is to be there.

A scale is a byte, every one of which is a number: bit 7 is the sign, bits 4 to 6 and 0 to 3 are e
and m of (1 + m / 16) * 2^(e - 7), in a unit that is a power of two. So weights take 4.25 bits in
groups of 32, and 4.5 bits in groups of 16.

VALUES were fitted by Lloyd's algorithm (Lloyd 1982, "Least squares quantization in PCM") to groups
of 32 normally distributed numbers, in turns with the best scale of either sign of each group, and
rounded to the integers with the least error among spans below 128. Their squared error is 0.55% of
the weights', that of the integers from -8 to 7 is 0.66%. Spans below 128 let kernels multiply
them as unsigned numbers of 7 bits, whose products with int8 do not saturate in pairs.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import CheckpointError

Array = NDArray[Any]

VALUES = (-69, -57, -44, -34, -25, -18, -11, -5, 1, 7, 13, 20, 27, 35, 44, 56)
"""By code."""
GROUPS = (32, 16)
"""Input channels that may share a scale."""


def values_of(codes: Array) -> NDArray[np.int8]:
    """The numbers that codes from 0 to 15 stand for."""
    return np.asarray(VALUES, np.int8)[codes.astype(np.uint8)]


def codes_of(values: Array) -> NDArray[np.uint8]:
    """The codes of numbers i8 that are among VALUES."""
    # By a table of all bytes, which takes a twentieth of the time of a search for each number.
    every = np.arange(256, dtype=np.uint8).view(np.int8)
    table = np.searchsorted(np.asarray(VALUES, np.int8), every).astype(np.uint8)
    return table[values.astype(np.int8, copy=False).view(np.uint8)]


def scales_of(codes: Array, unit: Array | np.floating[Any]) -> NDArray[np.float32]:
    """The scales f32 that bytes stand for, in a unit that is given for all or for each row [N, 1].

    f32 and bf16 have all of them exactly.
    """
    bits = codes.astype(np.uint32)
    exponent = (bits >> 4 & 7).astype(np.float32) - 7
    size = (1 + (bits & 15) / np.float32(16)) * np.exp2(exponent)
    sign = np.where(bits >> 7, np.float32(-1), np.float32(1))
    return (sign * size * unit).astype(np.float32)


def scale_units(scales: Array) -> NDArray[np.float32]:
    """The least unit of each row of scales [..., G] that `scale_codes` takes, [..., 1]."""
    _, exponent = np.frexp(np.max(np.abs(scales), axis=-1, keepdims=True))
    units: NDArray[np.float32] = np.ldexp(np.float32(1), exponent - 1)
    return units


def scale_codes(scales: Array, units: Array) -> NDArray[np.uint8]:
    """The bytes of scales that are among those of their unit.

    Raises:
        CheckpointError: one is not.
    """
    mantissa, exponent = np.frexp(np.abs(scales) / units)
    codes = (exponent + 6) * 16 + np.rint((2 * mantissa - 1) * 16).astype(np.int32)
    signs = (np.signbit(scales) << 7).astype(np.uint8)
    inside: NDArray[np.uint8] = np.clip(codes, 0, 127).astype(np.uint8) | signs
    if not np.array_equal(scales_of(inside, units), scales):
        raise CheckpointError(
            "a group's scale is none that iq4 weights have", remedy="Quantise the checkpoint again"
        )
    return inside
