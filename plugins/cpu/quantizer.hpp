// The "+ quantise" epilogue that several kernels share: plugins/rounding.py says what it means.
#pragma once

#include <type_traits>

#include "vector.hpp"

namespace trtc {

// plugins/rounding.py's LARGEST_CODES and LEAST_MAGNITUDE.
template <class Code>
constexpr float kLargestCode = std::is_same_v<Code, std::int8_t> ? 127.f : 448.f;
constexpr float kLeastMagnitude = 1e-10f;

// Rounds x to E4M3 by the largest magnitude of each `width` elements of a row, and back.
template <class T>
void round_trip(T* row, std::int64_t depth, std::int64_t width) {
  for (std::int64_t first = 0; first < depth; first += width) {
    T* x = row + first;
    Floats lanes{};
    for_vectors(width, [&](std::int64_t i, auto n) {
      lanes = max(lanes, as_floats(bits_of(load(x + i, n)) & 0x7fffffffu));
    });
    const float amax = largest(lanes);
    const float scale = (amax > kLeastMagnitude ? amax : kLeastMagnitude) / kLargestCode<f8e4m3>;
    for_vectors(width, [&](std::int64_t i, auto n) {
      store(x + i, rounded<f8e4m3>(load(x + i, n) / scale) * scale, n);
    });
  }
}

// Rounds to Through (the activation type), multiplies by a scale a column, rounds again, divides
// by one scale and casts to Out. Pre and Scale are the parameters' types: `none` when absent.
template <class Through, class Out, class Pre, class Scale>
class Quantizer {
 public:
  Quantizer(const View& pre_scale, const View& out_scale)
      : pre_scale_(static_cast<const float*>(pre_scale.data)), out_scale_(out_scale.scalar()) {}

  // out[0..n) = the values x of columns column..column+n.
  template <class N>
  void store(Out* out, std::int64_t column, Floats x, N n) const {
    x = rounded<Through>(x);
    if constexpr (!std::is_same_v<Pre, none>) x = rounded<Through>(x * load(pre_scale_ + column, n));
    if constexpr (!std::is_same_v<Scale, none>) x = x / out_scale_;
    trtc::store(out, x, n);
  }

 private:
  const float* pre_scale_;
  float out_scale_;
};

}  // namespace trtc
