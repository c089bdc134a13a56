// The quantisation after an operator, as plugins/rounding.py defines it for bf16 activations.
#pragma once

#include "cuda/ptx.cuh"

namespace trtc {

// Four neighbouring elements, stored at once.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T element[4];
};

// Rounds to bf16, multiplies by `pre_scale` (null: none; rounding again), divides by `out_scale`
// (null: none) and rounds to Out: columns `column` to `column + 3` of a row.
template <class Out>
__device__ inline void store_quantized(Out* row, int column, const float (&x)[4],
                                       const float* pre_scale, const float* out_scale) {
  Four<Out> four;
  for (int i = 0; i < 4; ++i) {
    float value = to_float(round_to<Bf16>(x[i]));
    if (pre_scale != nullptr) {
      value = to_float(round_to<Bf16>(value * pre_scale[column + i]));
    }
    if (out_scale != nullptr) value = __fdiv_rn(value, *out_scale);
    four.element[i] = round_to<Out>(value);
  }
  *reinterpret_cast<Four<Out>*>(row + column) = four;
}

}  // namespace trtc
