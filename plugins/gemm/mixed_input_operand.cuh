// The rows of x of mixed_input.cu as they are, on their way to the block's operand: mixed_input_digits.cuh or
// mixed_input_bf16.cuh, whose store_eight this calls, comes before it.
#pragma once

#include "gemm/mixed_input_tiles.cuh"

namespace trtc {

constexpr int kLoads = 4;  // that a thread has in flight

// Some chunks of the rows of x, on their way to shared memory in the order of the fragments.
struct Operand {
  u8* shared;  // where it begins
  const Bf16* x;  // the first chunk of the first row
  int rows, row_eights;

  // All of the block take part. `meanwhile` is called while the first of x are on their way.
  template <class Meanwhile>
  __device__ inline void store_all(Meanwhile meanwhile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint4 eights[kLoads];
    load(eights, threadIdx.x);
    meanwhile();
    store(eights, threadIdx.x);
    // Whole warps, for the shuffles.
    for (int first = threadIdx.x + kLoads * kThreads; first - lane < rows * row_eights;
         first += kLoads * kThreads) {
      load(eights, first);
      store(eights, first);
    }
  }

  __device__ inline void load(uint4 (&eights)[kLoads], int first) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = first + i * kThreads, row = index / row_eights;
      eights[i] = uint4{0, 0, 0, 0};
      if (index < rows * row_eights) {
        const Bf16* from = x + static_cast<long long>(row) * X_STRIDE + index % row_eights * 8;
        eights[i] = load_now(reinterpret_cast<const uint4*>(from));
      }
    }
  }

  __device__ inline void store(const uint4 (&eights)[kLoads], int first) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = first + i * kThreads;
      const int row = index / row_eights;
      if (index - lane < rows * row_eights) {
        store_eight(shared, row, index % row_eights, eights[i], row < rows);
      }
    }
  }
};

}  // namespace trtc
