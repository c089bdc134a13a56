"""Small integers that checkpoint formats pack into bytes and words: how to unpack them.

Every function is pure. "Codes" are the bare bits, 0 ... 2^bits - 1; `signed` reads them as two's
complement. 4-bit arrays are ml_dtypes' int4 and uint4, one element an item.

    format               container         lowest bits hold             next
    nvidia-modelopt      u8 [N/2, K]       row 2n                       row 2n+1
    its NVFP4            u8 [N, K/2]       column 2k                    column 2k+1
    compressed-tensors   i32 [N, K*bits/32]  column 0                   column 1, ...
    GPTQ weight          i32 [K/8, N]      row 8i                       row 8i+1, ...
    GPTQ zeros           i32 [G, N/8]      column 8j                    column 8j+1, ...
    AWQ weight           i32 [K, N/8]      column 8j                    8j+2, +4, +6, +1, +3, +5, +7
    AWQ zeros            i32 [G, N/8]      as the weight
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_NIBBLE, _SIX = 4, 6
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column (within eight) that each nibble of an AWQ word holds, lowest nibble first."""


def unpack_words(words: Array, bits: int, axis: int) -> Array:
    """The u8 codes in 32-bit words, lowest bits first, along `axis`. Those of 6 bits go on from one
    word to the next.

    Args:
        words: i32 or u32; `axis` of length n becomes n * 32 / bits, n being a multiple of 3 if
            `bits` is 6.
        bits: 4, 6 or 8.
    """
    moved = np.ascontiguousarray(np.moveaxis(words, axis, -1)).astype("<u4", copy=False)
    codes = moved.view(np.uint8)
    if bits == _NIBBLE:
        pairs = codes
        codes = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.uint8)
        np.bitwise_and(pairs, 15, out=codes[..., 0::2])
        np.right_shift(pairs, 4, out=codes[..., 1::2])
    if bits == _SIX:
        codes = _sixes_of(codes)
    return np.ascontiguousarray(np.moveaxis(codes, -1, axis))


def sixes_of_three(first: Any, second: Any, third: Any) -> tuple[Any, Any, Any, Any]:
    """The four codes u8 of 6 bits in three bytes, lowest bits first.

    Args:
        first: arrays, or torch's tensors, of u8.
    """
    return (
        first & 63,
        first >> 6 | (second & 15) << 2,
        second >> 4 | (third & 3) << 4,
        third >> 2,
    )


def three_of_sixes(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any]:
    """The inverse of `sixes_of_three`."""
    return a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2


def _sixes_of(stored: Array) -> Array:
    """Four codes of every three bytes of the last axis."""
    codes = sixes_of_three(*np.moveaxis(stored.reshape(*stored.shape[:-1], -1, 3), -1, 0))
    return np.stack(codes, axis=-1).reshape(*stored.shape[:-1], -1)


def doubled_e2m1(weight: Array) -> Array:
    """i8 of float4_e2m1fn: twice a number of it is an integer of at most 12."""
    return (2 * weight.astype(np.float32)).astype(np.int8)


def unpack_awq(words: Array) -> Array:
    """u8 codes [R, 8C] of AWQ's i32 words [R, C]."""
    nibbles = unpack_words(words, 4, 1).reshape(words.shape[0], -1, 8)
    codes = np.empty_like(nibbles)
    codes[..., list(AWQ_ORDER)] = nibbles
    return codes.reshape(words.shape[0], -1)


def unpack_row_pairs(pairs: Array) -> Array:
    """int4 [N, K] of nvidia-modelopt's u8 [N/2, K]: low nibbles are the even rows."""
    codes = np.empty((2 * pairs.shape[0], pairs.shape[1]), np.uint8)
    codes[0::2] = pairs & 15
    codes[1::2] = pairs >> 4
    return signed_nibbles(codes)


def unpack_e2m1_pairs(pairs: Array) -> Array:
    """float4_e2m1fn [N, K] of nvidia-modelopt's u8 [N, K/2]: low nibbles are the even columns."""
    codes = np.empty((pairs.shape[0], 2 * pairs.shape[1]), np.uint8)
    codes[:, 0::2] = pairs & 15
    codes[:, 1::2] = pairs >> 4
    return codes.view(ml_dtypes.float4_e2m1fn)


def signed_nibbles(codes: Array) -> Array:
    """int4 of u8 codes that are two's complement nibbles."""
    return ((codes.astype(np.int8) ^ np.int8(8)) - np.int8(8)).astype(ml_dtypes.int4)


def offset_nibbles(codes: Array) -> Array:
    """int4 of u8 codes that carry an offset of 8: code 0 is -8."""
    return (codes.astype(np.int8) - np.int8(8)).astype(ml_dtypes.int4)


def offset_sixes(codes: Array) -> Array:
    """int8 of u8 codes of 6 bits that carry an offset of 32: code 0 is -32."""
    return codes.view(np.int8) - np.int8(32)


def offset_bytes(codes: Array) -> Array:
    """int8 of u8 codes that carry an offset of 128: code 0 is -128."""
    return (codes ^ np.uint8(128)).view(np.int8)
