// Products of tiles of weights and of x, by the tensor cores that an SM has.
//
// A tile has rows of 128 bytes, 128 E4M3 or 64 bf16 numbers, in the order of gpu/hopper.cuh's
// panels: it begins at a multiple of 1024, and the 16-byte chunk c of row r lies at place
// c ^ (r % 8), so that eight rows of a column of chunks lie in different banks.
#pragma once

#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"

namespace trtc {

constexpr int kTileRowBytes = 128;
constexpr int kChunkBytes = 16;
constexpr int kStepBytes = 32;  // of a row, that one instruction multiplies

// Makes what this thread has copied into tiles visible to the MMAs of threads that synchronise with it.
__device__ inline void show_tiles() {
#if HAS_WGMMA
  publish_to_products();
#endif
}

// sums [64, kRows] += weights [64, 128 bytes] . x [kRows, 128 bytes]^T, by four warps. A lane has
// the sums that it has of hopper.cuh's multiply_shared.
//
// The products of a tile are added up apart and then to the rest: of a sum of E4M3 products the
// tensor cores keep fewer bits than f32 has, which many of them in a row would show.
template <class T, int kRows>
__device__ inline void multiply_tiles(float (&sums)[kRows / 2], unsigned weights, unsigned x) {
  constexpr int kSteps = kTileRowBytes / kStepBytes;
#if HAS_WGMMA
  float products[kRows / 2];
  begin_products();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply_shared<T, kRows>(products, operand_in_panels(weights + step * kStepBytes, 0),
                              operand_in_panels(x + step * kStepBytes, 0), step > 0);
  }
  commit_products();
  wait_for_products<0>();
  settle(products);
#else
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  float products[kRows / 2] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    // Rows 0 ... 7 and 8 ... 15 of the warp's 16, of a chunk and of the next one.
    const int chunk = 2 * step + lane / 16;
    const uint4 a = load_matrices(weights + panel_offset(16 * warp + lane % 16, chunk));
#pragma unroll
    for (int row = 0; row < kRows; row += 16) {
      // Eight rows of x, a chunk and the next one; then the eight rows after them, if there are.
      const int at = kRows == 8 ? lane % 8 : row + lane / 16 * 8 + lane % 8;
      const uint4 b = load_matrices(x + panel_offset(at, 2 * step + lane / 8 % 2));
      auto& part = reinterpret_cast<float(&)[kRows == 8 ? 1 : 2][4]>(products[row / 2]);
      multiply_16x8x16<T>(part[0], {a.x, a.y, a.z, a.w}, b.x, b.y);
      if constexpr (kRows > 8) multiply_16x8x16<T>(part[1], {a.x, a.y, a.z, a.w}, b.z, b.w);
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums[i] += products[i];
}

}  // namespace trtc
