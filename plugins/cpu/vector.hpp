// Vectors of floats: one spelling for AVX-512, AVX2 and plain C++ (the compiler's own vectors).
//
// Conversions agree bit for bit with the scalar ones of types.hpp.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "types.hpp"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace trtc {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TRTC_WIDE 1
inline constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t SignedWords __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t HalfWords __attribute__((vector_size(kLanes * 2)));
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));

inline Floats broadcast(float x) { return x - Floats{}; }  // x + 0 would turn -0 into +0
inline Words bits_of(Floats x) { return std::bit_cast<Words>(x); }
inline Floats as_floats(Words x) { return std::bit_cast<Floats>(x); }

// a * b + c with one rounding where the hardware has it.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(TRTC_WIDE)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Floats square_root(Floats x) {
#if defined(TRTC_WIDE)
  return (Floats)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);  // with a mask: see `widened`
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// The larger; the second when they do not compare.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a > b ? b : a; }

#if defined(TRTC_WIDE)
// GCC 12 goes through two halves and the stack for these. With a mask of all lanes, because without
// one its own intrinsics read variables that they never set (GCC bug 105593).
inline Words widened(HalfWords x) { return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
inline Words widened(Bytes x) { return (Words)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)x); }
inline HalfWords low_halves(Words x) { return (HalfWords)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x); }
inline Bytes low_bytes(Words x) { return (Bytes)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)x); }
#else
// Compilers know the instructions for one doubling of the width, not for two.
inline Words widened(HalfWords x) { return __builtin_convertvector(x, Words); }
inline Words widened(Bytes x) { return widened(__builtin_convertvector(x, HalfWords)); }
inline HalfWords low_halves(Words x) { return __builtin_convertvector(x, HalfWords); }
inline Bytes low_bytes(Words x) { return __builtin_convertvector(low_halves(x), Bytes); }
#endif

inline Floats lane_numbers() {
  Floats lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  return lanes;
}

// ---- conversions -------------------------------------------------------------------------------

// Bits of bf16 values, rounded to nearest even, in the low half of each word.
inline Words bf16_bits(Floats x) {
  const Words u = bits_of(x);
  const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return x == x ? rounded : ((u >> 16) | 0x40u);
}

// Bits of E4M3 values, saturated and rounded to nearest even, in the low byte of each word.
inline Words f8e4m3_bits(Floats x) {
  const Words u = bits_of(x);
  const Words sign = (u >> 24) & 0x80u;
  const Floats absolute = as_floats(u & 0x7fffffffu);
  const Floats magnitude = absolute < 448.f ? absolute : broadcast(448.f);
  const Words m = bits_of(magnitude);
  const Words normal = ((m + 0x7ffffu + ((m >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the format is fixed point with step 2^-9: the unit of a float near 2^14.
  const Words fixed = bits_of(magnitude + 0x1p14f) - bits_of(broadcast(0x1p14f));
  const Words finite = magnitude < 0x1p-6f ? fixed : normal;
  return sign | (x == x ? finite : (Words{} + 0x7fu));
}

// Bits of int8 values, saturated and rounded to nearest even, in the low byte of each word.
inline Words i8_bits(Floats x) {
  Floats clamped = x > -128.f ? x : broadcast(-128.f);
  clamped = clamped < 127.f ? clamped : broadcast(127.f);
  // The unit of a float near 1.5 * 2^23 is 1.
  return bits_of(clamped + 0x1.8p23f);
}

#if defined(TRTC_WIDE)
// bf16 bits of the 128 E4M3 magnitudes.
struct F8Table {
  alignas(64) std::uint16_t bits[128];

  constexpr F8Table() : bits() {
    for (std::uint32_t m = 0; m < 128; ++m) {
      const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(m) * 0x1p-9f) >> 16;
      bits[m] = static_cast<std::uint16_t>(m == 127 ? 0x7fc0 : m < 8 ? subnormal : (m << 4) + (120 << 7));
    }
  }
};
inline constexpr F8Table kF8Table;

// bf16 bits of the E4M3 codes in the low byte of each half word; the high bytes do not matter.
inline Words f8e4m3_to_bf16(Words codes) {
  const auto* table = reinterpret_cast<const __m512i*>(kF8Table.bits);
  const __m512i index = (__m512i)codes;
  const __m512i small = _mm512_permutex2var_epi16(table[0], index, table[1]);
  const __m512i large = _mm512_permutex2var_epi16(table[2], index, table[3]);
  const __mmask32 is_large = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(index, 8), _mm512_set1_epi16(-0x8000));
  return (Words)_mm512_or_si512(_mm512_mask_mov_epi16(small, is_large, large), sign);
}
#endif

#if defined(TRTC_WIDE)
// bf16 bits of n - 8 for the n in the low 4 bits of each half word; the other bits do not matter.
inline Words i4_to_bf16(Words codes) {
  constexpr auto bits = [] {
    std::array<std::uint16_t, 32> table{};
    for (int n = 0; n < 32; ++n) {
      table[n] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(n % 16 - 8)) >> 16);
    }
    return table;
  }();
  alignas(64) static constexpr auto kTable = bits;
  const __m512i table = _mm512_load_si512(kTable.data());
  return (Words)_mm512_maskz_permutexvar_epi16(0xffffffff, (__m512i)codes, table);
}
#endif

// Values of the E4M3 codes in the low byte of each word; the other bytes do not matter.
inline Floats f8e4m3_values(Words codes) {
#if defined(TRTC_WIDE)
  return as_floats(f8e4m3_to_bf16(codes) << 16);
#else
  // Sign, exponent and mantissa go where a float has them; the exponent's bias differs by 120.
  const Words placed = std::bit_cast<Words>(std::bit_cast<SignedWords>(codes << 24) >> 4) & 0x87f00000u;
  // A subnormal is read as 2^-6 * (1 + m/8), less the 2^-6: denormal floats would be slow.
  const auto subnormal = (placed & 0x07800000u) == 0u;
  const Words implicit_one = bits_of(broadcast(0x1p-6f)) | (placed & 0x80000000u);
  const Words value = placed + (subnormal ? Words{} + (121u << 23) : Words{} + (120u << 23));
  const Floats finite = as_floats(value) - as_floats(subnormal ? implicit_one : Words{});
  // The difference may be +0 where the value is -0, so the sign is set again.
  const Words special = (placed & 0x07f00000u) == 0x07f00000u ? Words{} + 0x7fc00000u : Words{};
  return as_floats(bits_of(finite) | (placed & 0x80000000u) | special);
#endif
}

// Values of the int8 in the low byte of each word; the other bytes do not matter.
inline Floats i8_values(Words codes) {
  return __builtin_convertvector(std::bit_cast<SignedWords>(codes << 24) >> 24, Floats);
}

// Values n - 8 of the n in the low 4 bits of each word; the other bits do not matter.
inline Floats i4_values(Words codes) {
#if defined(TRTC_WIDE)
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return (Floats)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, values);
#else
  return __builtin_convertvector(std::bit_cast<SignedWords>(codes & 15u) - 8, Floats);
#endif
}

// How many elements a word of a pool of T holds: bytes hold two of 4 bits.
template <class T>
inline constexpr int kPerWord = std::is_same_v<T, std::uint8_t> ? 8 : 4 / static_cast<int>(sizeof(T));

// elements[e] = element e of each word.
template <class T>
void unpack(Words words, Floats (&elements)[kPerWord<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    elements[0] = as_floats(words);
  } else if constexpr (std::is_same_v<T, bf16>) {
    elements[0] = as_floats(words << 16);
    elements[1] = as_floats(words & 0xffff0000u);
  } else if constexpr (std::is_same_v<T, std::int8_t>) {
    for (int e = 0; e < 4; ++e) elements[e] = i8_values(words >> (8 * e));
  } else if constexpr (std::is_same_v<T, std::uint8_t>) {
    for (int e = 0; e < 8; ++e) elements[e] = i4_values(words >> (4 * e));
  } else {
    static_assert(std::is_same_v<T, f8e4m3>);
#if defined(TRTC_WIDE)
    const Words even = f8e4m3_to_bf16(words), odd = f8e4m3_to_bf16(words >> 8);
    elements[0] = as_floats(even << 16);
    elements[1] = as_floats(odd << 16);
    elements[2] = as_floats(even & 0xffff0000u);
    elements[3] = as_floats(odd & 0xffff0000u);
#else
    for (int e = 0; e < 4; ++e) elements[e] = f8e4m3_values(words >> (8 * e));
#endif
  }
}

// ---- loads and stores --------------------------------------------------------------------------

// How many lanes of a vector are in memory: all (a constant, so that no code asks), or the first n.
using AllLanes = std::integral_constant<int, kLanes>;

template <class T>
Floats load(const T* from, AllLanes = {}) {
  if constexpr (std::is_same_v<T, float>) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
  } else if constexpr (std::is_same_v<T, bf16>) {
    HalfWords x;
    std::memcpy(&x, from, sizeof x);
    return as_floats(widened(x) << 16);
  } else {
    static_assert(std::is_same_v<T, f8e4m3> || std::is_same_v<T, std::int8_t>);
    Bytes x;
    std::memcpy(&x, from, sizeof x);
    if constexpr (std::is_same_v<T, std::int8_t>) return i8_values(widened(x));
    return f8e4m3_values(widened(x));
  }
}

// The even and the odd ones of 2 * kLanes values of 4 bits: see i4_values.
struct Pair {
  Floats even, odd;
};
inline Pair load_packed(const std::uint8_t* from) {
  Bytes x;
  std::memcpy(&x, from, sizeof x);
  const Words codes = widened(x);
  return {i4_values(codes), i4_values(codes >> 4)};
}

// The first n lanes; the others are zero.
template <class T>
Floats load(const T* from, int n) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, sizeof(T) * n);
  return load(padded);
}

template <class T>
void store(T* to, Floats x, AllLanes = {}) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, &x, sizeof x);
  } else if constexpr (std::is_same_v<T, bf16>) {
    const auto narrow = low_halves(bf16_bits(x));
    std::memcpy(to, &narrow, sizeof narrow);
  } else if constexpr (std::is_same_v<T, f8e4m3>) {
    const auto narrow = low_bytes(f8e4m3_bits(x));
    std::memcpy(to, &narrow, sizeof narrow);
  } else {
    static_assert(std::is_same_v<T, std::int8_t>);
    const auto narrow = low_bytes(i8_bits(x));
    std::memcpy(to, &narrow, sizeof narrow);
  }
}

template <class T>
void store(T* to, Floats x, int n) {
  T padded[kLanes];
  store(padded, x);
  std::memcpy(to, padded, sizeof(T) * n);
}

// x as T would hold it.
template <class T>
Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, f8e4m3>) {
    return f8e4m3_values(f8e4m3_bits(x));
  } else {
    static_assert(std::is_same_v<T, bf16>);
    return as_floats(bf16_bits(x) << 16);
  }
}

// Calls body(i, n) for the vectors of [0, count): n is AllLanes but for a shorter last one.
template <class Body>
void for_vectors(std::int64_t count, Body&& body) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, AllLanes{});
  if (count % kLanes != 0) body(i, static_cast<int>(count % kLanes));
}

// ---- across lanes ------------------------------------------------------------------------------

namespace detail {

template <int N>
struct FloatVector {
  typedef float type __attribute__((vector_size(N * 4)));
};

template <class V, int... I>
auto low_half(V x, std::integer_sequence<int, I...>) -> typename FloatVector<sizeof...(I)>::type {
  return __builtin_shufflevector(x, x, I...);
}

template <class V, int... I>
auto high_half(V x, std::integer_sequence<int, I...>) -> typename FloatVector<sizeof...(I)>::type {
  return __builtin_shufflevector(x, x, (I + static_cast<int>(sizeof...(I)))...);
}

template <class V, class Combine>
float fold(V x, Combine combine) {
  constexpr int n = sizeof(V) / sizeof(float);
  if constexpr (n == 4) {
    return combine(combine(x[0], x[2]), combine(x[1], x[3]));
  } else {
    using Half = std::make_integer_sequence<int, n / 2>;
    return fold(combine(low_half(x, Half{}), high_half(x, Half{})), combine);
  }
}

template <bool kHigh, int... I>
Words interleave(Words a, Words b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + (kHigh ? kLanes / 2 : 0) + (I % 2) * kLanes)...);
}

}  // namespace detail

// Lanes of two vectors in turn: the first half of the result, or the second.
template <bool kSecond>
Floats interleaved(Floats even, Floats odd) {
  return as_floats(detail::interleave<kSecond>(bits_of(even), bits_of(odd), std::make_integer_sequence<int, kLanes>{}));
}

inline float sum(Floats x) {
  return detail::fold(x, [](auto a, auto b) { return a + b; });
}

inline float largest(Floats x) {
  return detail::fold(x, [](auto a, auto b) { return a > b ? a : b; });
}

// Transposes a square of words: afterwards lane j of rows[i] is what lane i of rows[j] was.
inline void transpose(Words (&rows)[kLanes]) {
  using All = std::make_integer_sequence<int, kLanes>;
  // Each round is a perfect shuffle, which rotates the bits of (row, lane) by one.
#pragma GCC unroll 16
  for (int round = 1; round < kLanes; round *= 2) {
    Words next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = detail::interleave<false>(rows[i], rows[i + kLanes / 2], All{});
      next[2 * i + 1] = detail::interleave<true>(rows[i], rows[i + kLanes / 2], All{});
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// ---- functions ---------------------------------------------------------------------------------

// e^x within 2 ulp. Below -87.3 the answer is 0, from 88.3 it is infinity.
inline Floats exp(Floats x) {
  constexpr float kInverseLn2 = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // few bits: n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  const Floats shifted = x * kInverseLn2 + 0x1.8p23f;  // the low bits of the sum are round(x / ln2)
  const Floats n = shifted - 0x1.8p23f;
  const Floats r = fma(n, broadcast(-kLn2Low), fma(n, broadcast(-kLn2High), x));
  Floats series = broadcast(1.f / 5040);
  for (const float coefficient : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) {
    series = fma(series, r, broadcast(coefficient));
  }
  Floats result = as_floats(bits_of(series) + (bits_of(shifted) << 23));
  result = x < -87.3f ? broadcast(0.f) : result;
  result = x > 88.3f ? broadcast(std::numeric_limits<float>::infinity()) : result;
  return x == x ? result : x;
}

// Absolute error about 1e-7.
inline Floats tanh(Floats x) { return 1.f - 2.f / (exp(x + x) + 1.f); }

}  // namespace trtc
