// The quantisation after an operator, as plugins/rounding.py defines it for bf16 activations.
#pragma once

#include "gpu/rounding.cuh"

namespace trtc {

// Four neighbouring elements, stored at once.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T element[4];
};

// Divides by one number again and again without the branches of __fdiv_rn, and gives the same wherever
// the result is not near f32's smallest (P. Markstein, 1990: as `inverse` is rounded right and the rest
// is exact, the second guess is rounded right).
struct Divider {
  float by, inverse;

  __device__ inline explicit Divider(float by) : by(by), inverse(__fdiv_rn(1.f, by)) {}
  __device__ inline float operator()(float x) const {
    const float guess = x * inverse, rest = fmaf(-guess, by, x);
    const bool better = fabsf(rest) > 0.f && fabsf(rest) < infinity();
    return better ? fmaf(rest, inverse, guess) : guess;
  }
};

// Rounds to bf16, multiplies by `pre_scale` (null: none; rounding again), divides by `out_scale`
// (null: none) and rounds to Out. One stores many times: the compiler cannot know that no store changes
// the scale.
template <class Out>
struct Quantizer {
  const float *pre_scale, *out_scale;
  Divider divide;

  __device__ inline Quantizer(const float* pre_scale, const float* out_scale)
      : pre_scale(pre_scale),
        out_scale(out_scale),
        divide(out_scale != nullptr ? *out_scale : 1.f) {}

  // Columns `column` to `column + 3` of a row.
  __device__ inline void store(Out* row, int column, const float (&x)[4]) const {
    Four<Out> four;
    for (int i = 0; i < 4; ++i) {
      float value = through_bf16(x[i]);
      if (pre_scale != nullptr) {
        value = through_bf16(value * pre_scale[column + i]);
      }
      if (out_scale != nullptr) value = divide(value);
      four.element[i] = round_to<Out>(value);
    }
    *reinterpret_cast<Four<Out>*>(row + column) = four;
  }
};

}  // namespace trtc
