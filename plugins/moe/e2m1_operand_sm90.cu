// The rows of x that experts multiply, as e2m1_tiles_sm90.cu reads them: for each block of an expert's pairs
// the operand of its products, and what each row's products are multiplied by.
//
// A thread block takes eight rows of a block, a warp one row. The whole row has one power of two. Of the
// operand a group of channels follows the other, with the first numbers of all rows, then the second ones
// (TwoParts), in cores of eight rows: the even channels of a row, then the odd ones.
//
// Macros: K; NUM_EXPERTS, CAPACITY (of members); BLOCK_ROWS; ROWS_OF_PAIRS, GIVEN_STRIDE.
#include "moe/e2m1_sm90.cuh"

namespace {

using namespace trtc;

constexpr int kGroups = K / kGroup;
constexpr int kWarps = 8, kEights = BLOCK_ROWS / kWarps;
constexpr int kRuns = kGroup / 8;  // of eight channels, 16 bytes, in a group
constexpr int kMine = (kGroups + 31) / 32;  // groups of a lane

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * 32) operand_e2m1(const Bf16* __restrict__ given,
                                                                      const int* __restrict__ counts,
                                                                      const int* __restrict__ members,
                                                                      unsigned char* operand,
                                                                      float* x_scale) {
  extern __shared__ __align__(16) u8 shared_bytes[];
  auto& blocks = *reinterpret_cast<BlockList<BLOCK_ROWS, NUM_EXPERTS>*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.x / kEights, row = blockIdx.x % kEights * kWarps + warp;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  blocks.fill(counts);
  __syncthreads();
  if (block >= blocks.num_blocks) return;
  const Block found = blocks.find(counts, block);
  if (row >= found.found) return;
  const int pair = members[found.expert * CAPACITY + found.first + row];
  const auto* const runs = reinterpret_cast<const uint4*>(
      given + static_cast<long long>(pair / ROWS_OF_PAIRS) * GIVEN_STRIDE);
  uint4 eights[kMine][kRuns];  // of the groups lane, lane + 32, ...
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int group = lane + 32 * i;
      eights[i][run] = group < kGroups ? load_now(runs + group * kRuns + run) : uint4{0, 0, 0, 0};
    }
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) most = largest_bits(eights[i][run], most);
  }
  const ChannelScale scale(largest_of_warp(most));
  if (lane == 0) x_scale[block * BLOCK_ROWS + row] = scale.down;

  const int part_bytes = operand_rows(found.found) * kGroup;
  u8* const first = operand + static_cast<long long>(block) * (kGroups * BLOCK_ROWS * 2 * kGroup) +
                    row / 8 * 2 * kCoreBytes + row % 8 * 16;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int group = lane + 32 * i;
    if (group >= kGroups) break;
    unsigned words[2][2][kRuns];  // by part, then whether channels are odd
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const TwoParts parts(eights[i][run], odd, scale.up);
        words[0][odd][run] = parts.first;
        words[1][odd][run] = parts.second;
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const unsigned(&four)[kRuns] = words[part][odd];
        u8* const to = first + (2 * group + part) * part_bytes + odd * kCoreBytes;
        *reinterpret_cast<uint4*>(to) = {four[0], four[1], four[2], four[3]};
      }
    }
  }
}
