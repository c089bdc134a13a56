// Sixteen lanes in two AVX2 registers.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#define TRTC_INLINE [[gnu::always_inline]] inline

namespace trtc::gemm {

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};

TRTC_INLINE F32x16 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TRTC_INLINE F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TRTC_INLINE I32x16 splat(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

TRTC_INLINE I32x16 load_cells(const std::byte* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
TRTC_INLINE void store_cells(std::byte* p, I32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.hi);
}
TRTC_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TRTC_INLINE I32x16 load(const std::int32_t* p) { return load_cells(reinterpret_cast<const std::byte*>(p)); }
TRTC_INLINE void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
TRTC_INLINE void store(std::int32_t* p, I32x16 x) { store_cells(reinterpret_cast<std::byte*>(p), x); }

TRTC_INLINE F32x16 multiply(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
TRTC_INLINE F32x16 multiply_add(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

TRTC_INLINE I32x16 multiply(I32x16 a, I32x16 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
TRTC_INLINE I32x16 bit_and(I32x16 a, I32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
template <int n>
TRTC_INLINE I32x16 shift_right(I32x16 x) {
  return {_mm256_srli_epi32(x.lo, n), _mm256_srli_epi32(x.hi, n)};
}

TRTC_INLINE F32x16 to_f32(I32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
TRTC_INLINE F32x16 as_f32(I32x16 x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }

// Asks for a cache line that will be read soon (kSoon: within a microsecond).
template <bool kSoon>
TRTC_INLINE void fetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), kSoon ? _MM_HINT_T0 : _MM_HINT_T1);
}

// One cell of x in every lane, as the products below take it.
struct FloatCell {
  __m256 v;
};
struct ByteCell {
  __m256i even, odd;  // its bytes as words
};
struct NibbleCell {
  __m256i v;
};
TRTC_INLINE FloatCell float_cell(const std::uint32_t* x) { return {_mm256_set1_ps(std::bit_cast<float>(*x))}; }
TRTC_INLINE ByteCell byte_cell(const std::uint32_t* x) {
  const __m256i cell = _mm256_set1_epi32(static_cast<std::int32_t>(*x));
  return {_mm256_srai_epi16(_mm256_slli_epi16(cell, 8), 8), _mm256_srai_epi16(cell, 8)};
}
TRTC_INLINE NibbleCell nibble_cell(const std::uint32_t* x) {
  return {_mm256_set1_epi32(static_cast<std::int32_t>(*x))};
}

// sum += w0*x0 + w1*x1 + w2*x2 + w3*x3 over the bytes of each lane of w (unsigned) and of x (signed).
// vpmaddubsw would saturate, so bytes are widened to words first.
TRTC_INLINE void dot_u8i8(I32x16& sum, I32x16 w, ByteCell x) {
  const auto half = [&](__m256i s, __m256i a) {
    const __m256i low = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)), x.even);
    return _mm256_add_epi32(s, _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_srli_epi16(a, 8), x.odd)));
  };
  sum = {half(sum.lo, w.lo), half(sum.hi, w.hi)};
}
// The same for w in 0..15: pairs of products stay below 2^12, so vpmaddubsw is exact.
TRTC_INLINE void dot_u4i8(I32x16& sum, I32x16 w, NibbleCell x) {
  const auto half = [&](__m256i s, __m256i a) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(a, x.v), _mm256_set1_epi16(1)));
  };
  sum = {half(sum.lo, w.lo), half(sum.hi, w.hi)};
}

// sum += w * x, x a float.
TRTC_INLINE void dot_f32(F32x16& sum, I32x16 w, FloatCell x) {
  sum = multiply_add(as_f32(w), {x.v, x.v}, sum);
}

}  // namespace trtc::gemm
