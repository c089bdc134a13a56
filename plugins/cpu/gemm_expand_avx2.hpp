// Converts weights of fewer than 32 bits to floats in AVX2 registers.
#pragma once

#include "gemm_format.hpp"

namespace trtc::gemm {

// Whether a product's weights are widened by a few instructions a register.
template <class Of>
constexpr bool kWidens = Of::kPath == Path::f32 && (Of::kWeight == DType::bf16 || Of::kWeight == DType::f8e4m3);

// The float of E4M3 codes that are the highest byte of each lane. Sign, exponent and mantissa go where
// a float has them, the exponent's bias being 120 more; a subnormal becomes one that way, and so right.
TRTC_INLINE __m256 f8e4m3_to_f32(__m256i codes) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87f00000));
  const __m256i placed = _mm256_and_si256(_mm256_srai_epi32(codes, 4), mask);
  return _mm256_mul_ps(_mm256_castsi256_ps(placed), _mm256_set1_ps(0x1p120f));
}

// One block as floats: out[k] has 16 columns.
template <DType kWeight, bool>
TRTC_INLINE void widen_block(const std::byte* from, const std::int32_t*, I32x16 (&out)[block_depth(kWeight)]) {
  const I32x16 block = load_cells(from);
  const auto widen = [&]<int k>(std::integral_constant<int, k>) {
    const auto half = [](__m256i cells) {
      if constexpr (kWeight == DType::f8e4m3) {
        return _mm256_castps_si256(f8e4m3_to_f32(_mm256_slli_epi32(cells, 24 - cell_shift(k))));
      }
      if constexpr (k == 0) return _mm256_slli_epi32(cells, 16);
      return _mm256_and_si256(cells, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    };
    out[k] = {half(block.lo), half(block.hi)};
  };
  widen(std::integral_constant<int, 0>{});
  widen(std::integral_constant<int, 1>{});
  if constexpr (block_depth(kWeight) == 4) {
    widen(std::integral_constant<int, 2>{});
    widen(std::integral_constant<int, 3>{});
  }
}

// One block of layout compact as floats: out[k] has 16 columns.
TRTC_INLINE void widen_compact(const std::byte* from, I32x16 (&out)[8]) {
  const __m128i high_bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(kCompactHighBytes));
  const __m256i table = _mm256_broadcastsi128_si256(high_bytes), mask = _mm256_set1_epi8(15);
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const I32x16 nibbles = load_cells(from + 2 * kBlockBytes);
  // Of 8 columns: bytes for four k -> floats of these.
  const auto join = [&](__m256i low, __m256i codes, __m256i(&floats)[4]) {
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask));
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    floats[0] = _mm256_slli_epi32(first, 16);
    floats[1] = _mm256_and_si256(first, odd);
    floats[2] = _mm256_slli_epi32(second, 16);
    floats[3] = _mm256_and_si256(second, odd);
  };
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const I32x16 bytes = load_cells(from + half * kBlockBytes);
    const auto codes = [&](__m256i cells) { return half == 0 ? cells : _mm256_srli_epi16(cells, 4); };
    __m256i lo[4], hi[4];
    join(bytes.lo, codes(nibbles.lo), lo);
    join(bytes.hi, codes(nibbles.hi), hi);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) out[half * 4 + k] = {lo[k], hi[k]};
  }
}

}  // namespace trtc::gemm
