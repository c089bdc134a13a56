// What the lanes of a warp work out together.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

// The same for all lanes.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace trtc
