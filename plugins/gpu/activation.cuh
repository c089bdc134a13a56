// Activations of gated linear units, as plugins/activations.py defines them.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

constexpr float kLog2OfE = 1.4426950408889634f;

// gelu(x) in its tanh form is x / (1 + 2^gelu_power(x)):
// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), which does not cancel; 2 sqrt(2 / pi).
__device__ inline float gelu_power(float x) {
  return -kLog2OfE * 1.5957691216057308f * (x + 0.044715f * x * x * x);
}

// The same of silu, x * sigmoid(x), and of its approximation of gelu, x * sigmoid(1.702 x).
__device__ inline float silu_power(float x) { return -kLog2OfE * x; }
__device__ inline float quick_gelu_power(float x) { return silu_power(1.702f * x); }

// silu(x), or gelu(x) in its tanh form.
template <bool kGeluTanh>
__device__ inline float activated(float x) {
  return __fdiv_rn(x, 1.f + exp2_approx(kGeluTanh ? gelu_power(x) : silu_power(x)));
}

// What the sums of one column of a gated linear unit are multiplied by.
struct Factors {
  float gate;  // that of gate, to the exponent of the activation
  float both;  // the product of both
};

// activation(gate) * up / out_scale, of sums that have not been scaled.
template <bool kGeluTanh>
struct GatedUnit {
  float by_gate = 1, by_both = 1;  // what Factors are, beside the scales of a column

  __device__ inline GatedUnit() {}
  __device__ inline GatedUnit(float input_scale, float out_scale)
      : by_gate(input_scale), by_both(__fdiv_rn(input_scale * input_scale, out_scale)) {}

  __device__ inline Factors factors(float gate_scale, float up_scale) const {
    return {(kGeluTanh ? by_gate : -kLog2OfE * by_gate) * gate_scale,
            by_both * gate_scale * up_scale};
  }

  // With the two of a column's Factors; activation(x) is x / (1 + 2^power).
  __device__ inline static float of(float gate, float up, float by, float by_both) {
    const float power = kGeluTanh ? gelu_power(gate * by) : gate * by;
    return gate * up * by_both * reciprocal_approx(1.f + exp2_approx(power));
  }
};

}  // namespace trtc
