// The "+ quantise" epilogue that several kernels share: plugins/rounding.py says what it means.
#pragma once

#include <type_traits>

#include "vector.hpp"

namespace trtc {

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
