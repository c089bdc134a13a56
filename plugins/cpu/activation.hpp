// The activations of MLPs, on vectors.
#pragma once

#include "vector.hpp"

namespace trtc {

template <Activation kActivation>
Floats activated(Floats x) {
  if constexpr (kActivation == Activation::silu) {
    return x / (1.f + exp(-x));
  } else if constexpr (kActivation == Activation::quick_gelu) {
    return x / (1.f + exp(-1.702f * x));
  } else if constexpr (kActivation == Activation::sigmoid) {
    return 1.f / (1.f + exp(-x));
  } else if constexpr (kActivation == Activation::relu2) {
    const Floats positive = max(x, Floats{});
    return positive * positive;
  } else {
    // 0.5 x (1 + tanh(y)) is x / (1 + e^-2y), without the cancellation.
    const Floats y = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.f + exp(-2.f * y));
  }
}

}  // namespace trtc
