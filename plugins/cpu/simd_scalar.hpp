// Sixteen lanes in plain loops, for any machine.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace trtc::gemm {

struct F32x16 {
  float v[16];
};
struct I32x16 {
  std::int32_t v[16];
};

namespace detail {
template <class R, class F>
TRTC_INLINE R each_lane(F&& f) {
  R result;
  for (int i = 0; i < 16; ++i) result.v[i] = f(i);
  return result;
}
}  // namespace detail

TRTC_INLINE F32x16 zero_f32() { return {}; }
TRTC_INLINE F32x16 splat(float x) {
  return detail::each_lane<F32x16>([&](int) { return x; });
}
TRTC_INLINE I32x16 splat(std::int32_t x) {
  return detail::each_lane<I32x16>([&](int) { return x; });
}

TRTC_INLINE F32x16 load(const float* p) {
  return detail::each_lane<F32x16>([&](int i) { return p[i]; });
}
TRTC_INLINE I32x16 load(const std::int32_t* p) {
  return detail::each_lane<I32x16>([&](int i) { return p[i]; });
}
TRTC_INLINE I32x16 load_cells(const std::byte* p) {
  I32x16 x;
  std::memcpy(x.v, p, sizeof x.v);
  return x;
}
TRTC_INLINE void store_cells(std::byte* p, I32x16 x) { std::memcpy(p, x.v, sizeof x.v); }
TRTC_INLINE void store(std::int32_t* p, I32x16 x) { std::memcpy(p, x.v, sizeof x.v); }
TRTC_INLINE void store(float* p, F32x16 x) { std::memcpy(p, x.v, sizeof x.v); }

TRTC_INLINE F32x16 multiply(F32x16 a, F32x16 b) {
  return detail::each_lane<F32x16>([&](int i) { return a.v[i] * b.v[i]; });
}
TRTC_INLINE F32x16 multiply_add(F32x16 a, F32x16 b, F32x16 c) {
  return detail::each_lane<F32x16>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}

TRTC_INLINE I32x16 multiply(I32x16 a, I32x16 b) {
  return detail::each_lane<I32x16>([&](int i) { return a.v[i] * b.v[i]; });
}
TRTC_INLINE I32x16 bit_and(I32x16 a, I32x16 b) {
  return detail::each_lane<I32x16>([&](int i) { return a.v[i] & b.v[i]; });
}
// The bits of a where the mask has ones, else those of b.
TRTC_INLINE I32x16 select_bits(I32x16 mask, I32x16 a, I32x16 b) {
  return detail::each_lane<I32x16>([&](int i) { return (mask.v[i] & a.v[i]) | (~mask.v[i] & b.v[i]); });
}
template <int n>
TRTC_INLINE I32x16 shift_left(I32x16 x) {
  return detail::each_lane<I32x16>(
      [&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x.v[i]) << n); });
}
template <int n>
TRTC_INLINE I32x16 shift_right(I32x16 x) {
  return detail::each_lane<I32x16>(
      [&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x.v[i]) >> n); });
}

// The bytes of a table that the bytes of x, below 16, are indices of.
TRTC_INLINE I32x16 look_up(I32x16 x, const std::uint8_t* table) {
  return detail::each_lane<I32x16>([&](int i) {
    std::uint32_t lane = 0;
    for (int shift = 0; shift < 32; shift += 8) lane |= std::uint32_t{table[(x.v[i] >> shift) & 15]} << shift;
    return static_cast<std::int32_t>(lane);
  });
}

// The numbers that sixteen bytes are as scales of iq4 (plugins/iq4.py): a sign, and seven bits that lie in
// a float at the lowest bits of an exponent of 120 and the highest of the mantissa.
TRTC_INLINE F32x16 byte_scales(const std::uint8_t* p) {
  return detail::each_lane<F32x16>([&](int i) {
    const std::uint32_t sign = p[i] & 0x80u, size = p[i] & 0x7fu;
    return std::bit_cast<float>(sign << 24 | size << 19 | 120u << 23);
  });
}

// The powers of two that sixteen bytes are as E8M0: exponents of floats, of which 0 is a subnormal.
TRTC_INLINE F32x16 e8m0_scales(const std::uint8_t* p) {
  return detail::each_lane<F32x16>(
      [&](int i) { return std::bit_cast<float>(p[i] == 0 ? 1u << 22 : std::uint32_t{p[i]} << 23); });
}

// The numbers that sixteen bytes are as E4M3: times 2^-120 where their bits lie in a float, subnormals too.
TRTC_INLINE F32x16 e4m3_scales(const std::uint8_t* p) {
  return detail::each_lane<F32x16>([&](int i) {
    const std::uint32_t sign = p[i] & 0x80u, size = p[i] & 0x7fu;
    return std::bit_cast<float>(sign << 24 | size << 20) * 0x1p120f;
  });
}

TRTC_INLINE F32x16 to_f32(I32x16 x) {
  return detail::each_lane<F32x16>([&](int i) { return static_cast<float>(x.v[i]); });
}
TRTC_INLINE F32x16 as_f32(I32x16 x) {
  return detail::each_lane<F32x16>([&](int i) { return std::bit_cast<float>(x.v[i]); });
}

// Prefetches a cache line that will be read soon (kSoon: within a microsecond).
template <bool kSoon>
TRTC_INLINE void fetch(const std::byte* p) {
  __builtin_prefetch(p, 0, kSoon ? 3 : 2);
}

// One cell of x, as the products below take it.
struct Cell {
  std::uint32_t bits;
};
TRTC_INLINE Cell broadcast_cell(const std::uint32_t* x) { return {*x}; }

// Unsigned bytes by int8, four a lane. Sums wrap as the machine's do: offsets that are taken back
// later may pass 2^31 on the way.
constexpr bool kBytesAreWords = false;
template <int>
TRTC_INLINE I32x16 byte_part(I32x16 block) {
  return block;
}
TRTC_INLINE void dot_bytes(I32x16& sum, I32x16 w, Cell x) {
  for (int i = 0; i < 4; ++i) {
    const int factor = static_cast<std::int8_t>(x.bits >> (8 * i));
    for (int lane = 0; lane < 16; ++lane) {
      const auto product = static_cast<std::uint32_t>(((w.v[lane] >> (8 * i)) & 0xff) * factor);
      sum.v[lane] = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum.v[lane]) + product);
    }
  }
}
TRTC_INLINE void dot_nibbles(I32x16& sum, I32x16 w, Cell x) { dot_bytes(sum, w, x); }
TRTC_INLINE void dot_small_bytes(I32x16& sum, I32x16 w, Cell x) { dot_bytes(sum, w, x); }

// sum += w * x, x a float.
TRTC_INLINE void dot_f32(F32x16& sum, I32x16 w, Cell x) {
  sum = multiply_add(as_f32(w), splat(std::bit_cast<float>(x.bits)), sum);
}

}  // namespace trtc::gemm
