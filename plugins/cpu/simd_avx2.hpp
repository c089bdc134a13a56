// Sixteen lanes in two AVX2 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

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
// The bits of a where the mask has ones, else those of b.
TRTC_INLINE I32x16 select_bits(I32x16 mask, I32x16 a, I32x16 b) {
  return {_mm256_or_si256(_mm256_and_si256(mask.lo, a.lo), _mm256_andnot_si256(mask.lo, b.lo)),
          _mm256_or_si256(_mm256_and_si256(mask.hi, a.hi), _mm256_andnot_si256(mask.hi, b.hi))};
}
template <int n>
TRTC_INLINE I32x16 shift_left(I32x16 x) {
  return {_mm256_slli_epi32(x.lo, n), _mm256_slli_epi32(x.hi, n)};
}
template <int n>
TRTC_INLINE I32x16 shift_right(I32x16 x) {
  return {_mm256_srli_epi32(x.lo, n), _mm256_srli_epi32(x.hi, n)};
}

// The bytes of a table that the bytes of x, below 16, are indices of.
TRTC_INLINE I32x16 look_up(I32x16 x, const std::uint8_t* table) {
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(bytes, x.lo), _mm256_shuffle_epi8(bytes, x.hi)};
}

// The numbers that sixteen bytes are as scales of iq4 (plugins/iq4.py): a sign, and seven bits that lie in
// a float at the lowest bits of an exponent of 120 and the highest of the mantissa.
TRTC_INLINE F32x16 byte_scales(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const auto wide = [](__m128i eight) {
    const __m256i placed = _mm256_slli_epi32(_mm256_cvtepi8_epi32(eight), 19);
    const __m256i inside = _mm256_and_si256(placed, _mm256_set1_epi32(static_cast<int>(0x83f80000)));
    return _mm256_castsi256_ps(_mm256_or_si256(inside, _mm256_set1_epi32(120 << 23)));
  };
  return {wide(bytes), wide(_mm_srli_si128(bytes, 8))};
}

// The powers of two that sixteen bytes are as E8M0: exponents of floats, of which 0 is a subnormal.
TRTC_INLINE F32x16 e8m0_scales(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const auto wide = [](__m128i eight) {
    const __m256i placed = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(placed, _mm256_set1_epi32(1 << 22)));
  };
  return {wide(bytes), wide(_mm_srli_si128(bytes, 8))};
}

// The numbers that sixteen bytes are as E4M3: times 2^-120 where their bits lie in a float, subnormals too.
TRTC_INLINE F32x16 e4m3_scales(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const auto wide = [](__m128i eight) {
    const __m256i placed = _mm256_slli_epi32(_mm256_cvtepi8_epi32(eight), 20);
    const __m256i inside = _mm256_and_si256(placed, _mm256_set1_epi32(static_cast<int>(0x87f00000)));
    return _mm256_mul_ps(_mm256_castsi256_ps(inside), _mm256_set1_ps(0x1p120f));
  };
  return {wide(bytes), wide(_mm_srli_si128(bytes, 8))};
}

TRTC_INLINE F32x16 to_f32(I32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
TRTC_INLINE F32x16 as_f32(I32x16 x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }

// Prefetches a cache line that will be read soon (kSoon: within a microsecond).
template <bool kSoon>
TRTC_INLINE void fetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), kSoon ? _MM_HINT_T0 : _MM_HINT_T1);
}

// One cell of x in every lane. Written down, as the products of codes are: GCC 12 would load cells of
// several rows ahead and add products to each other before the sums, and spill sums to have room.
struct Cell {
  __m256i v;
};
TRTC_INLINE Cell broadcast_cell(const std::uint32_t* x) {
  Cell cell;
  asm volatile("vpbroadcastd %1, %0" : "=x"(cell.v) : "m"(*x));
  return cell;
}

// Unsigned bytes by int8. vpmaddubsw would saturate, so both are words: the even bytes of a block and
// its odd ones, each by a cell of two int8 that were widened when they were packed.
constexpr bool kBytesAreWords = true;
template <int part>
TRTC_INLINE I32x16 byte_part(I32x16 block) {
  const __m256i low = _mm256_set1_epi16(0xff);
  if constexpr (part == 0) return {_mm256_and_si256(block.lo, low), _mm256_and_si256(block.hi, low)};
  return {_mm256_srli_epi16(block.lo, 8), _mm256_srli_epi16(block.hi, 8)};
}
// sum += the products of the words of each lane of w and of x.
TRTC_INLINE void dot_bytes(__m256i& sum, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
}
TRTC_INLINE void dot_bytes(I32x16& sum, I32x16 w, Cell x) {
  dot_bytes(sum.lo, w.lo, x.v);
  dot_bytes(sum.hi, w.hi, x.v);
}

// Nibbles by int8: pairs of products stay below 2^12, so vpmaddubsw is exact, and eight of them may be
// added up as words.
constexpr int kWordProducts = 8;
TRTC_INLINE void dot_in_words(__m256i& words, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(words), "=&x"(product) : "x"(w), "x"(x));
}
TRTC_INLINE void dot_in_words(I32x16& words, I32x16 w, Cell x) {
  dot_in_words(words.lo, w.lo, x.v);
  dot_in_words(words.hi, w.hi, x.v);
}
TRTC_INLINE void add_words(I32x16& sum, I32x16 words) {
  const __m256i one = _mm256_set1_epi16(1);
  sum = {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(words.lo, one)),
         _mm256_add_epi32(sum.hi, _mm256_madd_epi16(words.hi, one))};
}
TRTC_INLINE void dot_nibbles(I32x16& sum, I32x16 w, Cell x) {
  I32x16 words = splat(0);
  dot_in_words(words, w, x);
  add_words(sum, words);
}

// Bytes of 7 bits by int8: a pair of products fits a word.
TRTC_INLINE void dot_small_bytes(__m256i& sum, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(product)
      : "x"(w), "x"(x), "x"(_mm256_set1_epi16(1)));
}
TRTC_INLINE void dot_small_bytes(I32x16& sum, I32x16 w, Cell x) {
  dot_small_bytes(sum.lo, w.lo, x.v);
  dot_small_bytes(sum.hi, w.hi, x.v);
}

// sum += w * x, x a float.
TRTC_INLINE void dot_f32(F32x16& sum, I32x16 w, Cell x) {
  const __m256 v = _mm256_castsi256_ps(x.v);
  sum = multiply_add(as_f32(w), {v, v}, sum);
}

}  // namespace trtc::gemm
