// Element types and views shared by every CPU kernel. Header-only, C++20, no dependencies.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace trtc {

// An optional parameter that a call leaves out has this element type.
struct none {};

struct bf16 {
  std::uint16_t bits;
};

struct f16 {
  std::uint16_t bits;
};

// E4M3FN: no infinities, largest finite value 448, NaN is 0x7f.
struct f8e4m3 {
  std::uint8_t bits;
};

// A byte holding two 4-bit values, the first in the low nibble.
struct i4x2 {
  std::uint8_t bits;
};
struct u4x2 {
  std::uint8_t bits;
};
struct f4e2m1x2 {
  std::uint8_t bits;
};

// Values of the operators' enum attributes.
// iq4: codes of gemm_format.hpp's kIq4Values, two a byte. i6: integers of 6 bits, packed.
enum class DType { f32, bf16, f16, f8e4m3, f4e2m1, i8, i4, u4, i32, u8, iq4, i6 };
enum class Activation { silu, gelu_tanh, relu2, quick_gelu, sigmoid };
enum class Layout { row_major, packed, planes, compact };
enum class Multiply { exact, dynamic_i8 };
enum class ActQuant { none, f8e4m3, i8, dynamic_f8e4m3, dynamic_i8 };
enum class Score { softmax, sigmoid, sparsemixer };
enum class GroupScore { max, top2_sum };

// A row-major matrix, or some columns of one: element (i, j) is at data[i * row_stride + j].
struct View {
  void* data;
  std::int64_t row_stride;

  template <class T>
  T* row(std::int64_t i) const {
    return static_cast<T*>(data) + i * row_stride;
  }

  // The one value of a 0-dimensional f32 tensor, or 1 when an optional scale is absent.
  float scalar() const { return data == nullptr ? 1.f : *static_cast<const float*>(data); }
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
float to_float(f8e4m3 x);
inline float to_float(std::int8_t x) { return static_cast<float>(x); }

// Conversions round to nearest, ties to even, and saturate where the type has no infinity
// (ONNX QuantizeLinear and Cast with saturate=1).
template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
  std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<std::uint16_t>((u >> 16) | 0x40)};
  u += 0x7fffu + ((u >> 16) & 1u);
  return bf16{static_cast<std::uint16_t>(u >> 16)};
}

template <>
inline std::int8_t from_float<std::int8_t>(float x) {
  return static_cast<std::int8_t>(std::fmin(127.f, std::fmax(-128.f, std::nearbyint(x))));
}

inline float to_float(f8e4m3 x) {
  const std::uint32_t magnitude = x.bits & 0x7fu;
  const float sign = (x.bits & 0x80u) ? -1.f : 1.f;
  if (magnitude == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  // Placed in a float's exponent and mantissa the value is 2^-120 of its own, subnormals too.
  return sign * (std::bit_cast<float>(magnitude << 20) * 0x1p120f);
}

template <>
inline f8e4m3 from_float<f8e4m3>(float x) {
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return f8e4m3{static_cast<std::uint8_t>(sign | 0x7f)};
  const float magnitude = std::fmin(std::fabs(x), 448.f);
  // Below 2^-6 the format is fixed point with step 2^-9.
  if (magnitude < 0x1p-6f) {
    return f8e4m3{static_cast<std::uint8_t>(sign | static_cast<int>(std::nearbyint(magnitude * 512.f)))};
  }
  std::uint32_t u = std::bit_cast<std::uint32_t>(magnitude);
  u += 0x7ffffu + ((u >> 20) & 1u);
  return f8e4m3{static_cast<std::uint8_t>(sign | ((u >> 20) - (120u << 3)))};
}

}  // namespace trtc
