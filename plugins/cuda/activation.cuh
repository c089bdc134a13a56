// Activations of gated linear units, as plugins/activations.py defines them.
#pragma once

#include "cuda/ptx.cuh"

namespace trtc {

constexpr float kLog2OfE = 1.4426950408889634f;

// gelu(x) in its tanh form is x / (1 + 2^gelu_power(x)):
// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), which does not cancel; 2 sqrt(2 / pi).
__device__ inline float gelu_power(float x) {
  return -kLog2OfE * 1.5957691216057308f * (x + 0.044715f * x * x * x);
}

// silu(x), or gelu(x) in its tanh form.
template <bool kGeluTanh>
__device__ inline float activated(float x) {
  const float power = kGeluTanh ? gelu_power(x) : -kLog2OfE * x;
  return __fdiv_rn(x, 1.f + exp2_approx(power));
}

}  // namespace trtc
