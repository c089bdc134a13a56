// Sixteen lanes in one AVX-512 register.
#pragma once

#include <immintrin.h>

#include <cstdint>

// GCC 12's own intrinsics read variables that they never set (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace trtc::gemm {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};

TRTC_INLINE F32x16 zero_f32() { return {_mm512_setzero_ps()}; }
TRTC_INLINE F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
TRTC_INLINE I32x16 splat(std::int32_t x) { return {_mm512_set1_epi32(x)}; }

TRTC_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TRTC_INLINE I32x16 load(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
TRTC_INLINE I32x16 load_cells(const std::byte* p) { return {_mm512_loadu_si512(p)}; }
TRTC_INLINE void store_cells(std::byte* p, I32x16 x) { _mm512_storeu_si512(p, x.v); }
TRTC_INLINE void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
TRTC_INLINE void store(std::int32_t* p, I32x16 x) { _mm512_storeu_si512(p, x.v); }

TRTC_INLINE F32x16 multiply(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TRTC_INLINE F32x16 multiply_add(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

TRTC_INLINE I32x16 multiply(I32x16 a, I32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
TRTC_INLINE I32x16 bit_and(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
// The bits of a where the mask has ones, else those of b.
TRTC_INLINE I32x16 select_bits(I32x16 mask, I32x16 a, I32x16 b) {
  return {_mm512_ternarylogic_epi32(mask.v, a.v, b.v, 0xca)};
}
template <int n>
TRTC_INLINE I32x16 shift_left(I32x16 x) {
  return {_mm512_slli_epi32(x.v, n)};
}
template <int n>
TRTC_INLINE I32x16 shift_right(I32x16 x) {
  return {_mm512_srli_epi32(x.v, n)};
}

// The bytes of a table that the bytes of x, below 16, are indices of.
TRTC_INLINE I32x16 look_up(I32x16 x, const std::uint8_t* table) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(bytes, x.v)};
}

// The numbers that sixteen bytes are as scales of iq4 (plugins/iq4.py): a sign, and seven bits that lie in
// a float at the lowest bits of an exponent of 120 and the highest of the mantissa.
TRTC_INLINE F32x16 byte_scales(const std::uint8_t* p) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0x83f80000)), base = _mm512_set1_epi32(120 << 23);
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_slli_epi32(wide, 19), mask, base, 0xea))};
}

// The powers of two that sixteen bytes are as E8M0: exponents of floats, of which 0 is a subnormal.
TRTC_INLINE F32x16 e8m0_scales(const std::uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(wide, 23), _mm512_set1_epi32(1 << 22)))};
}

// The numbers that sixteen bytes are as E4M3: times 2^-120 where their bits lie in a float, subnormals too.
TRTC_INLINE F32x16 e4m3_scales(const std::uint8_t* p) {
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0x87f00000));
  const __m512 placed = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(wide, 20), mask));
  return {_mm512_mul_ps(placed, _mm512_set1_ps(0x1p120f))};
}

TRTC_INLINE F32x16 to_f32(I32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
TRTC_INLINE F32x16 as_f32(I32x16 x) { return {_mm512_castsi512_ps(x.v)}; }

// Prefetches a cache line that will be read soon (kSoon: within a microsecond).
template <bool kSoon>
TRTC_INLINE void fetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), kSoon ? _MM_HINT_T0 : _MM_HINT_T1);
}

// One cell of x in every lane. Written down, because GCC 12 would load the cells of several rows
// ahead, for which a tile of sums leaves no registers, and spill the sums. A broadcast of its own for
// all panels of a step: as part of each product it would take a load for every multiplication, and
// the loads set the pace then.
struct Cell {
  __m512i v;
};
TRTC_INLINE Cell broadcast_cell(const std::uint32_t* x) {
  Cell cell;
  asm volatile("vpbroadcastd %1, %0" : "=v"(cell.v) : "m"(*x));
  return cell;
}

// Unsigned bytes by int8, four a lane.
constexpr bool kBytesAreWords = false;
template <int>
TRTC_INLINE I32x16 byte_part(I32x16 block) {
  return block;
}
TRTC_INLINE void dot_bytes(I32x16& sum, I32x16 w, Cell x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
}
TRTC_INLINE void dot_nibbles(I32x16& sum, I32x16 w, Cell x) { dot_bytes(sum, w, x); }
TRTC_INLINE void dot_small_bytes(I32x16& sum, I32x16 w, Cell x) { dot_bytes(sum, w, x); }
// sum += w0*x0 + w1*x1 over the bf16 of each lane of w and of x.
TRTC_INLINE void dot_bf16(F32x16& sum, I32x16 w, Cell x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
}
// sum += w * x, x a float.
TRTC_INLINE void dot_f32(F32x16& sum, I32x16 w, Cell x) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
}

}  // namespace trtc::gemm

#pragma GCC diagnostic pop
