"""What the inline assembly of plugins/gemm/triton/weights.py computes, for Triton's interpreter."""

import triton
import triton.language as tl


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
