// The end of skinny.cu where the first half of the weight's rows is gate's and the second up's:
// out = quantize(activation(gate) * up), of half as many columns. What two launches round is rounded
// here too, in the same order: results are those of linear and swiglu after it.
//
// A tile has eight rows of gate, then those of up for the same columns of out, and so on: a thread's
// sums of its two rows are of one column.
//
// Macros, beside those of skinny.cu: GELU_TANH (else silu), HAS_OUT_SCALE, OUT_E4M3 (0 or 1; else bf16).
#pragma once

#include "gpu/activation.cuh"
#include "gpu/rounding.cuh"

namespace trtc {

#if OUT_E4M3
using Gated = E4m3;
#else
using Gated = Bf16;
#endif
constexpr int kOutColumns = N / 2;
static_assert(kOutColumns % 8 == 0);

// The row of the weight, and the column of out, of row n of the tiles.
__device__ inline int gated_row(int n) { return n / 16 * 8 + n % 8 + n % 16 / 8 * kOutColumns; }
__device__ inline int gated_column(int n) { return n / 16 * 8 + n % 8; }

__device__ inline Gated gated(float gate, float up, float out_scale) {
  const float x = through_bf16(gate);
  const float exponent = GELU_TANH ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
  const float unit = divided_full(x, 1.f + exp2_approx((0.f - exponent) * kLog2OfE));
  const float product = through_bf16(through_bf16(unit) * through_bf16(up));
  return round_to<Gated>(HAS_OUT_SCALE ? __fdiv_rn(product, out_scale) : product);
}

}  // namespace trtc
