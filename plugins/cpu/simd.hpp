// Sixteen lanes of float or int32, on whatever the compiler was told the machine has.
//
// The three implementations have the same functions, so that kernels are written once:
//   TRTC_AVX512   AVX-512 F/BW/DQ/VL with VNNI and BF16: adds dot_bf16
//   TRTC_AVX2     AVX2 and FMA
//   otherwise     plain loops
// Results may differ in the last bits between them (fused or separate multiply-add, bf16 pairs),
// never between calls of one build.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TRTC_AVX512 1
#include "simd_avx512.hpp"
#elif defined(__AVX2__) && defined(__FMA__)
#define TRTC_AVX2 1
#include "simd_avx2.hpp"
#else
#include "simd_scalar.hpp"
#endif

namespace trtc::gemm {

// Byte or nibble fields of sixteen 32-bit cells, the field number being known at compile time.
template <int kShift>
TRTC_INLINE I32x16 field(I32x16 cells, std::int32_t mask) {
  return bit_and(shift_right<kShift>(cells), splat(mask));
}

// E4M3 codes 0..255 to their exact values; NaN codes give 480, layouts.py lets none in.
TRTC_INLINE F32x16 f8e4m3_to_f32(I32x16 codes) {
  const I32x16 magnitude = bit_and(codes, splat(0x7f));
  const I32x16 subnormal = less(magnitude, splat(8));
  // A subnormal is placed in the mantissa of 2^-6, which is then subtracted; a normal number only
  // needs its exponent's bias changed by 120.
  const I32x16 bias = add(splat(120 << 23), bit_and(subnormal, splat(1 << 23)));
  const F32x16 placed = as_f32(add(shift_left<20>(magnitude), bias));
  const F32x16 value = subtract(placed, as_f32(bit_and(subnormal, as_i32(splat(0x1p-6f)))));
  return as_f32(bit_or(as_i32(value), shift_left<24>(bit_and(codes, splat(0x80)))));
}

}  // namespace trtc::gemm
