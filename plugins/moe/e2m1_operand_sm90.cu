// The rows of x that experts multiply, as e2m1_tiles_sm90.cu reads them: for each block of an expert's pairs
// the operand of its products, and what each row's products are multiplied by.
//
// A thread block takes one pair, counted expert after expert. The whole row has one power of two. Of the
// operand a group of channels follows the other, with the first numbers of all rows, then the second ones
// (TwoParts), in cores of eight rows: the even channels of a row, then the odd ones.
//
// Macros: K; NUM_EXPERTS, CAPACITY (of members); BLOCK_ROWS; WARPS, SHARED_BYTES; ROWS_OF_PAIRS, GIVEN_STRIDE;
// PAIRS_KNOWN (0 or 1: counts and members are there before the wait, as the kernel before has RELEASES_LATE).
#include "moe/e2m1_sm90.cuh"

namespace {

using namespace trtc;

constexpr int kGroups = K / kGroup, kThreads = WARPS * 32;
constexpr int kRuns = kGroup / 8;  // of eight channels, 16 bytes, in a group
constexpr int kMine = (kGroups + kThreads - 1) / kThreads;  // groups of a thread

struct Shared {
  BlockList<BLOCK_ROWS, NUM_EXPERTS> blocks;
  int ends[NUM_EXPERTS];    // of the experts' pairs
  unsigned largest[WARPS];  // magnitude that each warp has
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// A thread's channels of a row: of the groups thread, thread + kThreads, ...
struct Channels {
  uint4 eights[kMine][kRuns];

  __device__ inline explicit Channels(const Bf16* row) {
    const auto* const runs = reinterpret_cast<const uint4*>(row);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        eights[i][run] = group(i) < kGroups ? load_now(runs + group(i) * kRuns + run) : uint4{0, 0, 0, 0};
      }
    }
  }

  static __device__ inline int group(int i) { return static_cast<int>(threadIdx.x) + kThreads * i; }

  // The largest magnitude of the row, by all threads.
  __device__ inline unsigned largest(unsigned (&of_warps)[WARPS]) const {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) most = largest_bits(eights[i][run], most);
    }
    most = largest_of_warp(most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = max(most, of_warps[warp]);
    return most;
  }

  // Args: first: of the row in its block; part_bytes: of the first or the second numbers of a group.
  __device__ inline void store(u8* first, int part_bytes, float up) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (group(i) >= kGroups) break;
      store_group(eights[i], group(i), first, part_bytes, up);
    }
  }

  static __device__ inline void store_group(const uint4 (&eights)[kRuns], int group, u8* first, int part_bytes,
                                            float up) {
    unsigned words[2][2][kRuns];  // by part, then whether channels are odd
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const TwoParts parts(eights[run], odd, up);
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
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) operand_e2m1(
    const Bf16* __restrict__ given, const int* __restrict__ counts, const int* __restrict__ members,
    unsigned char* operand, float* x_scale) {
  extern __shared__ __align__(16) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int thread = threadIdx.x;
  let_next_kernel_start();
  if (!PAIRS_KNOWN) wait_for_earlier_kernels();
  shared.blocks.fill(counts);
  if (thread < 32) add_up(shared.ends, [&](int expert) { return counts[expert]; });
  __syncthreads();
  const int number = blockIdx.x, expert = ends_up_to(shared.ends, number);
  const bool is_pair = expert < NUM_EXPERTS;
  const int found = is_pair ? counts[expert] : 0, at = is_pair ? number - (shared.ends[expert] - found) : 0;
  const int pair = is_pair ? members[expert * CAPACITY + at] : 0;
  if (PAIRS_KNOWN) wait_for_earlier_kernels();
  if (!is_pair) return;
  const Channels channels(given + static_cast<long long>(pair / ROWS_OF_PAIRS) * GIVEN_STRIDE);
  const ChannelScale scale(channels.largest(shared.largest));

  const int block = shared.blocks.begin(expert) + at / BLOCK_ROWS, row = at % BLOCK_ROWS;
  if (thread == 0) x_scale[block * BLOCK_ROWS + row] = scale.down;
  const int part_bytes = operand_rows(min(found - (at - row), BLOCK_ROWS)) * kGroup;
  u8* const first = operand + static_cast<long long>(block) * (kGroups * BLOCK_ROWS * 2 * kGroup) +
                    row / 8 * 2 * kCoreBytes + row % 8 * 16;
  channels.store(first, part_bytes, scale.up);
}
