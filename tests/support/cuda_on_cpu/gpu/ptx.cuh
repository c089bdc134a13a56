// plugins/gpu/ptx.cuh in plain C++.
#pragma once

#include "device.hpp"

namespace trtc {

struct Bf16 {
  unsigned short bits;
};
struct F16 {
  unsigned short bits;
};
struct E4m3 {
  unsigned char bits;
};
struct I8 {
  signed char value;
};
struct U4x2 {
  unsigned char bits;
};

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - shared_bytes);
}

inline void forget(unsigned&) {}
void wait_for_earlier_kernels();
inline void let_next_kernel_start() {}
inline void wait_last() {}
inline float load_early(const float* address) { return *address; }
// An array of a test begins anywhere.
template <class Four>
inline Four load_four(const Four* address) {
  Four four;
  std::memcpy(&four, address, sizeof(four));
  return four;
}
inline float4 load_early(const float4* address) { return load_four(address); }
inline uint4 load_now(const uint4* address) { return load_four(address); }
inline void prefetch_to_l2(const void* global, unsigned bytes) {
  // What lies there is only looked at, so that a tool that checks addresses can object.
  volatile unsigned char seen = static_cast<const unsigned char*>(global)[0];
  seen = static_cast<const unsigned char*>(global)[bytes - 1];
  (void)seen;
}
inline unsigned long long evict_first() { return 0; }

// `bytes` of `total`, and zeros.
void copy_async(unsigned to, const void* from, int bytes, int total);
inline void copy_async_16(unsigned to, const void* from, int bytes) {
  copy_async(to, from, bytes, 16);
}
inline void copy_async_4(unsigned to, const void* from) { copy_async(to, from, 4, 4); }

inline void stream_async(unsigned to, const void* from, int bytes, unsigned long long) {
  copy_async_16(to, from, bytes);
}

inline uint2 load_shared_8(unsigned from) {
  uint2 words;
  std::memcpy(&words, shared_bytes + from, sizeof(words));
  return words;
}
inline uint4 load_shared(unsigned from) {
  uint4 words;
  std::memcpy(&words, shared_bytes + from, 16);
  return words;
}

inline void store_shared(unsigned to, uint2 words) { std::memcpy(shared_bytes + to, &words, 8); }
inline void store_shared(unsigned to, uint4 words) { std::memcpy(shared_bytes + to, &words, 16); }

uint4 load_matrices(unsigned from);
unsigned transpose_matrix(unsigned word);
void commit_copies();
void finish_copies(int most_left);
template <int kGroups>
inline void wait_for_copies() {
  finish_copies(kGroups);
}

template <class T>
inline T round_to(float x);
template <>
inline Bf16 round_to<Bf16>(float x);

inline unsigned mask_and_flip(unsigned word, unsigned mask, unsigned flip) {
  return (word & mask) ^ flip;
}

inline unsigned subtract_bf16(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int half = 0; half < 2; ++half) {
    const float one = __uint_as_float(a >> 16 * half << 16);
    const float other = __uint_as_float(b >> 16 * half << 16);
    result |= __float_as_uint(one - other) >> 16 << 16 * half;
  }
  return result;
}

inline unsigned multiply_add_bf16(unsigned a, unsigned b, unsigned c) {
  const auto half_of = [](unsigned pair, int half) {
    return __uint_as_float(pair >> 16 * half << 16);
  };
  unsigned result = 0;
  for (int half = 0; half < 2; ++half) {
    const float exact = std::fma(half_of(a, half), half_of(b, half), half_of(c, half));
    result |= round_to<Bf16>(exact).bits << 16 * half;
  }
  return result;
}

inline int sum_bytes(unsigned word) {
  int sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<signed char>(word >> 8 * i);
  return sum;
}

inline float infinity() { return INFINITY; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float divided_full(float x, float y) { return x / y; }

inline float to_float(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline float to_float(F16 x) {
  _Float16 half;
  std::memcpy(&half, &x.bits, 2);
  return static_cast<float>(half);
}
inline float to_float(E4m3 x) {
  const int exponent = (x.bits >> 3) & 15, mantissa = x.bits & 7;
  float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  if ((x.bits & 0x7f) == 0x7f) size = NAN;
  return x.bits & 0x80 ? -size : size;
}

template <class T>
inline T round_to(float x);

template <>
inline float round_to<float>(float x) {
  return x;
}

template <>
inline Bf16 round_to<Bf16>(float x) {
  const unsigned bits = __float_as_uint(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline F16 round_to<F16>(float x) {
  const auto half = static_cast<_Float16>(x);
  F16 rounded;
  std::memcpy(&rounded.bits, &half, 2);
  return rounded;
}

template <>
inline E4m3 round_to<E4m3>(float x) {
  if (std::isnan(x)) return {0x7f};
  const unsigned char sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fmin(std::fabs(x), 448.f);
  const float unit = std::ldexp(1.f, std::max(std::ilogb(std::fmax(size, 1e-30f)), -6) - 3);
  const float rounded = std::nearbyint(size / unit) * unit;
  unsigned char best = 0;
  while (to_float(E4m3{best}) < rounded) ++best;
  return {static_cast<unsigned char>(sign | best)};
}

template <>
inline I8 round_to<I8>(float x) {
  if (std::isnan(x)) return {0};
  return {static_cast<signed char>(std::fmax(-128.f, std::fmin(127.f, std::nearbyint(x))))};
}

inline unsigned pack_bf16(float low, float high) {
  return round_to<Bf16>(low).bits | static_cast<unsigned>(round_to<Bf16>(high).bits) << 16;
}
inline unsigned pack_f16(float low, float high) {
  return round_to<F16>(low).bits | static_cast<unsigned>(round_to<F16>(high).bits) << 16;
}
inline unsigned pack_e4m3(float a, float b, float c, float d) {
  return round_to<E4m3>(a).bits | round_to<E4m3>(b).bits << 8 | round_to<E4m3>(c).bits << 16 |
         static_cast<unsigned>(round_to<E4m3>(d).bits) << 24;
}
inline uint2 e4m3_to_f16(unsigned four) {
  float value[4];
  for (int i = 0; i < 4; ++i) {
    value[i] = to_float(E4m3{static_cast<unsigned char>(four >> (8 * i))});
  }
  return {pack_f16(value[0], value[1]), pack_f16(value[2], value[3])};
}

// Element `which` of those in a register.
template <class T>
inline float element_of(unsigned word, int which) {
  T element;
  std::memcpy(&element, reinterpret_cast<const char*>(&word) + which * sizeof(T), sizeof(T));
  return to_float(element);
}
template <class T>
inline float half_of(unsigned pair, int which) {
  return element_of<T>(pair, which);
}

// d += a . b of fragments whose elements have so many bytes.
void multiply_fragments(float* d, const unsigned* a, const unsigned* b, int bytes,
                        float (*element)(unsigned word, int which));

template <class T>
inline void multiply_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  multiply_fragments(d, a, b, sizeof(T), element_of<T>);
}

void multiply_16x8x32(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

}  // namespace trtc
