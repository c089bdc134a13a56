// What kernels of attention agree on, whatever holds their keys: heads, scores, and the keys that a token
// sees.
//
// Macros: NUM_HEADS NUM_KV_HEADS WINDOW CHUNKED SOFTCAP.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kGroup = NUM_HEADS / NUM_KV_HEADS;

constexpr __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr __device__ int smaller(int a, int b) { return a < b ? a : b; }
constexpr __device__ int larger(int a, int b) { return a > b ? a : b; }

// Two weights as operands of the tensor cores, `low` in the low half.
template <class Operand>
__device__ inline unsigned weight_operand(float low, float high);
template <>
__device__ inline unsigned weight_operand<Bf16>(float low, float high) {
  return pack_bf16(low, high);
}
template <>
__device__ inline unsigned weight_operand<F16>(float low, float high) {
  return pack_f16(low, high);
}

// A head's sink is one more score of its softmax, in units of log2 here, without a value.
__device__ inline float sink_of(const float* sinks, int head) {
  return sinks ? sinks[head] * kLog2E : -infinity();
}

// The first key that the token at a position sees: of its window, or of its chunk of as many positions.
__device__ inline int first_seen(int position) {
  if constexpr (CHUNKED != 0) return position - position % larger(1, WINDOW);
  return WINDOW > 0 ? larger(0, position - WINDOW + 1) : 0;
}

// A score in units of log2, from the product of a query with a stored key; `scale` is SCALE times
// the scale of stored keys. Rounded as written, so that it is the same bits wherever it is inlined.
__device__ inline float score(float product, float scale) {
  if constexpr (SOFTCAP > 0) {
    // tanh(x) = 1 - 2 / (1 + e^2x)
    constexpr float kCap = SOFTCAP > 0 ? SOFTCAP : 1;
    const float x = __fmul_rn(product, scale / kCap);
    const float above = reciprocal_approx(1.f + exp2_approx(__fmul_rn(2.f * kLog2E, x)));
    return __fmul_rn(fmaf(-2.f, above, 1.f), kCap * kLog2E);
  } else {
    return __fmul_rn(product, scale * kLog2E);
  }
}

// A factor that a call may go without.
__device__ inline float value_or_one(const float* factor) { return factor ? *factor : 1.f; }

}  // namespace trtc
