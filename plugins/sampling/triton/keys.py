"""Integers in the order of floats, to search for a value bit by bit."""

import triton
import triton.language as tl


@triton.jit
def key_of(values):
    """i32 in the order of f32 `values`; -0.0 and 0.0 have one key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The f32 whose key is `key`, an i32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
