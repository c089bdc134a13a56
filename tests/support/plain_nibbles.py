"""What the inline assembly of plugins/gemm/triton/weights.py computes, for Triton's interpreter."""

import triton
import triton.language as tl

from trtc.plugins.iq4 import VALUES

NUMBERS = tl.constexpr(VALUES)


@triton.jit
def numbers(packed, SIGNED: tl.constexpr):
    even, odd = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
    if SIGNED:
        even, odd = (even ^ 8) - 8, (odd ^ 8) - 8
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def bf16_nibbles(packed, SIGNED: tl.constexpr):
    even, odd = numbers(packed, SIGNED)
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def bf16_iq4(packed):
    return number_of_iq4(packed & 15).to(tl.bfloat16), number_of_iq4(packed >> 4).to(tl.bfloat16)


@triton.jit
def bf16_e2m1_codes(packed):
    even, odd = number_of_e2m1(packed & 15), number_of_e2m1(packed >> 4)
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def bf16_six(first, second, high):
    """By the definition: the high bits of a code count 16 each, and it is 32 too much."""
    a = (first % 16).to(tl.float32) + (high % 4).to(tl.float32) * 16 - 32
    b = (first // 16).to(tl.float32) + (high // 4 % 4).to(tl.float32) * 16 - 32
    c = (second % 16).to(tl.float32) + (high // 16 % 4).to(tl.float32) * 16 - 32
    d = (second // 16).to(tl.float32) + (high // 64).to(tl.float32) * 16 - 32
    return a.to(tl.bfloat16), b.to(tl.bfloat16), c.to(tl.bfloat16), d.to(tl.bfloat16)


@triton.jit
def number_of_iq4(code):
    number = tl.zeros_like(code.to(tl.float32))
    for i in tl.static_range(16):
        number = tl.where(code == i, NUMBERS[i], number)
    return number


@triton.jit
def bf16_e2m1(packed, factor):
    wide = factor.to(tl.float32)
    even, odd = number_of_e2m1(packed & 15) * wide, number_of_e2m1(packed >> 4) * wide
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def number_of_e2m1(code):
    """By the definition: sign, two bits of exponent of bias 1, one bit of mantissa."""
    exponent = ((code >> 1) & 3).to(tl.float32)
    mantissa = (code & 1).to(tl.float32) * 0.5
    normal = (1 + mantissa) * tl.exp2(exponent - 1)
    magnitude = tl.where(exponent == 0, mantissa, normal)
    return tl.where(code >= 8, -magnitude, magnitude)
