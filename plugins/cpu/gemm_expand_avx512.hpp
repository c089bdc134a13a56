// Converts weights of fewer than 16 bits to bf16 in AVX-512 registers.
#pragma once

#include <array>
#include <bit>
#include <type_traits>

#include "gemm_format.hpp"
#include "gemm_six_bits.hpp"

// GCC 12's own intrinsics read variables that they never set (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace trtc::gemm {

// Whether a product's weights are widened to bf16.
template <class Of>
constexpr bool kWidens = Of::kPath == Path::bf16 && Of::kExpands;

// E4M3 codes to 2^-8 of their values in bf16, exactly, from the low or the high byte of each word.
// With that factor a normal number only needs its bits moved and a constant filled in. The eight
// subnormals come from a table: vdpbf16ps would take bf16 subnormals for zeros.
template <bool kHigh>
TRTC_INLINE __m512i f8e4m3_to_bf16(__m512i words) {
  const auto all = [](int bits) { return _mm512_set1_epi16(static_cast<short>(bits)); };
  const __m512i subnormals =
      _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
  const __m512i moved = kHigh ? _mm512_srli_epi16(words, 4) : _mm512_slli_epi16(words, 4);
  const __m512i codes = kHigh ? _mm512_srli_epi16(words, 8) : words;
  const __m512i signs = kHigh ? words : _mm512_slli_epi16(words, 8);
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(words, all(kHigh ? 0x7800 : 0x78));
  // (moved & 0x7f0) | 0x3800, then value | (signs & 0x8000)
  const __m512i normal = _mm512_ternarylogic_epi32(moved, all(0x7f0), all(0x3800), 0xea);
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_subnormal, codes, subnormals);
  return _mm512_ternarylogic_epi32(value, signs, all(0x8000), 0xf8);
}

// bf16 pairs of the int8 at two places of each cell; integers below 256 are exact.
template <int kFirstShift, int kSecondShift>
TRTC_INLINE __m512i i8_to_bf16(__m512i cells) {
  const auto value = [&](int shift) {
    const __m512i code = _mm512_and_si512(_mm512_srli_epi32(cells, shift), _mm512_set1_epi32(255));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128))));
  };
  const __m512i high = _mm512_and_si512(value(kSecondShift), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm512_or_si512(_mm512_srli_epi32(value(kFirstShift), 16), high);
}

// bf16 of the integers 0..15 and -16..-1, by their low five bits.
TRTC_INLINE __m512i small_integers() {
  alignas(64) static constexpr std::uint16_t kTable[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130,
      0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  return _mm512_load_si512(kTable);
}

// bf16 of the numbers that E2M1 codes stand for.
TRTC_INLINE __m512i e2m1_values() {
  alignas(32) static constexpr std::uint16_t kTable[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                                           0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                                           0xc000, 0xc040, 0xc080, 0xc0c0};
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kTable)));
}

// bf16 of the numbers that iq4 codes stand for.
TRTC_INLINE __m512i iq4_values() {
  alignas(32) static constexpr auto kTable = [] {
    std::array<std::uint16_t, 16> bits{};
    for (int i = 0; i < 16; ++i) {
      bits[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(kIq4Values[i])) >> 16);
    }
    return bits;
  }();
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kTable.data())));
}

// bf16 of packed codes of 6 bits, which are the low bits of words.
TRTC_INLINE __m512i six_bit_values(__m512i codes) {
  alignas(64) static constexpr auto kTable = [] {
    std::array<std::uint16_t, 64> bits{};
    for (int i = 0; i < 64; ++i) {
      bits[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(i - kSixOffset)) >> 16);
    }
    return bits;
  }();
  const __m512i negative = _mm512_load_si512(kTable.data()), positive = _mm512_load_si512(kTable.data() + 32);
  return _mm512_permutex2var_epi16(negative, codes, positive);
}

// One block of codes of 6 bits as pairs of bf16.
TRTC_INLINE void widen_six(const std::byte* from, I32x16 (&out)[8]) {
  const auto widen = [&]<int part>(std::integral_constant<int, part>) {
    const __m512i codes = six_bits<part>(from).v;
    out[2 * part] = {six_bit_values(_mm512_and_si512(codes, _mm512_set1_epi16(63)))};
    out[2 * part + 1] = {six_bit_values(_mm512_srli_epi16(codes, 8))};
  };
  widen(std::integral_constant<int, 0>{});
  widen(std::integral_constant<int, 1>{});
  widen(std::integral_constant<int, 2>{});
  widen(std::integral_constant<int, 3>{});
}

// One block as pairs of bf16: out[k / 2] has 16 columns. zero: int32 of this panel's columns.
template <DType kWeight, bool kHasZero>
TRTC_INLINE void widen_block(const std::byte* from, const std::int32_t* zero,
                             I32x16 (&out)[block_depth(kWeight) / 2]) {
  const __m512i block = _mm512_loadu_si512(from);
  if constexpr (kWeight == DType::i6) {
    widen_six(from, out);
  } else if constexpr (kWeight == DType::f8e4m3) {
    out[0] = {f8e4m3_to_bf16<false>(block)};
    out[1] = {f8e4m3_to_bf16<true>(block)};
  } else if constexpr (kWeight == DType::i8) {
    out[0] = {i8_to_bf16<cell_shift(0), cell_shift(1)>(block)};
    out[1] = {i8_to_bf16<cell_shift(2), cell_shift(3)>(block)};
  } else {
    const __m512i low = _mm512_set1_epi16(15);
    __m512i offset = _mm512_set1_epi16(kWeight == DType::i4 ? 8 : 0);
    if constexpr (kHasZero) {
      const __m512i zeros = _mm512_loadu_si512(zero);
      offset = _mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16));
    }
    const auto value = [&](__m512i codes) {
      if constexpr (kWeight == DType::f4e2m1) return _mm512_permutexvar_epi16(codes, e2m1_values());
      if constexpr (kWeight == DType::iq4) return _mm512_permutexvar_epi16(codes, iq4_values());
      return _mm512_permutexvar_epi16(_mm512_sub_epi16(codes, offset), small_integers());
    };
    out[0] = {value(_mm512_and_si512(block, low))};
    out[1] = {value(_mm512_and_si512(_mm512_srli_epi16(block, 8), low))};
    out[2] = {value(_mm512_and_si512(_mm512_srli_epi16(block, 4), low))};
    out[3] = {value(_mm512_srli_epi16(block, 12))};
  }
}

// One block of layout compact as pairs of bf16.
TRTC_INLINE void widen_compact(const std::byte* from, I32x16 (&out)[4]) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kCompactHighBytes)));
  const __m512i nibbles = _mm512_loadu_si512(from + 2 * kBlockBytes), mask = _mm512_set1_epi8(15);
  const auto join = [&](const std::byte* bytes, __m512i codes, I32x16* pairs) {
    const __m512i low = _mm512_loadu_si512(bytes);
    const __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
    pairs[0] = {_mm512_unpacklo_epi8(low, high)};
    pairs[1] = {_mm512_unpackhi_epi8(low, high)};
  };
  join(from, nibbles, out);
  join(from + kBlockBytes, _mm512_srli_epi16(nibbles, 4), out + 2);
}

}  // namespace trtc::gemm

#pragma GCC diagnostic pop
