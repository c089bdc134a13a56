// rms_norm (plugins/rms_norm) of mixed_input.cu's one row of x, on its way to the block's operand: rounded
// as that operator rounds. Every block sums the squares of the whole row, all in the same order.
#pragma once

#include "gemm/mixed_input_tiles.cuh"
#include "gpu/warp.cuh"

#if HAS_NORM
namespace trtc {

static_assert(ROWS == 1, "a block has the squares of one row");

constexpr int kRowEights = K / 8;
constexpr int kNormEights = (kRowEights + kThreads - 1) / kThreads;  // that a thread has

// Chunks of the row that a block multiplies with.
struct ChunkRange {
  int first, count;
};

// The same for all threads.
__device__ inline float block_sum(float x, float* sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  x = warp_sum(x);
  if (lane == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < kThreads / 32 ? sums[lane] : 0.f);
}

struct Norm {
  float factors[kNormEights][8] = {};  // the norm's weight, beside this thread's part of the row
  uint4 eights[kNormEights];

  __device__ inline static int index_of(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }

  __device__ inline explicit Norm(const float* weight) {
#pragma unroll
    for (int i = 0; i < kNormEights; ++i) {
      if (index_of(i) >= kRowEights) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = index_of(i) * 2 + half;
        const float4 four = load_early(reinterpret_cast<const float4*>(weight) + at);
        float(&to)[8] = factors[i];
        to[4 * half] = four.x, to[4 * half + 1] = four.y;
        to[4 * half + 2] = four.z, to[4 * half + 3] = four.w;
      }
    }
  }

  __device__ inline void load(const Bf16* x) {
#pragma unroll
    for (int i = 0; i < kNormEights; ++i) {
      eights[i] = uint4{0, 0, 0, 0};
      if (index_of(i) < kRowEights) {
        eights[i] = load_now(reinterpret_cast<const uint4*>(x) + index_of(i));
      }
    }
  }

  // All of the block take part. `sums` has room for one float a warp.
  __device__ inline void store(u8* operand, float* sums, const float* pre_scale,
                               ChunkRange chunks) const {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kNormEights; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) squares = fmaf(element(i, j), element(i, j), squares);
    }
    const float eps = EPS;
    const float mean_square = __fdiv_rn(block_sum(squares, sums), K);
    const float scale = __fdiv_rn(1.f, __fsqrt_rn(mean_square + eps));
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kNormEights; ++i) {
      // Whole warps, for the shuffles.
      if (index_of(i) - lane >= kRowEights) continue;
      const bool inside = index_of(i) < kRowEights;
      float normed[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        normed[j] = through_bf16(element(i, j) * scale * factors[i][j]);
        if (HAS_NORM_PRE_SCALE && inside) normed[j] *= pre_scale[index_of(i) * 8 + j];
      }
      const int run = index_of(i) - chunks.first * 16;
      store_eight(operand, 0, run,
                  uint4{pack_bf16(normed[0], normed[1]), pack_bf16(normed[2], normed[3]),
                        pack_bf16(normed[4], normed[5]), pack_bf16(normed[6], normed[7])},
                  inside && run >= 0 && run < chunks.count * 16);
    }
  }

  __device__ inline float element(int i, int j) const {
    const uint4& eight = eights[i];
    const unsigned pair = j < 4 ? (j < 2 ? eight.x : eight.y) : (j < 6 ? eight.z : eight.w);
    return __uint_as_float(j % 2 ? pair & 0xffff0000u : pair << 16);
  }
};

}  // namespace trtc
#endif
