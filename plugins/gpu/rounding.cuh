// Roundings that a launch of its own would make where it stores its result.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

__device__ inline float through_bf16(float x) { return to_float(round_to<Bf16>(x)); }

}  // namespace trtc
