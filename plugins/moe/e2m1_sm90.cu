// A product of experts with E2M1 weights in groups of 32 with E8M0 scales (MXFP4, OCP Microscaling Formats
// 1.0), for so few rows of each expert that reading the weights is the bound:
//
//     GATED   out[pair] = activation(gate) * (up + UP_OFFSET) of given[pair / ROWS_OF_PAIRS], in bf16
//     else    out[pair] = given[pair / ROWS_OF_PAIRS] @ weight.T + bias, in f32
//
// The pairs of an expert fall into blocks of ROWS, the weight into tiles of 64 rows. A thread block takes
// a run of items, (block, tile) in that order, and shares of all thread blocks are the same. It splits K
// over TEAMS warpgroups, in chunks of 256 channels. Each warp streams its rows of the weight by TMA through a
// ring of its own in shared memory, across items. One team of the block adds up an item's sums, in the order of the
// teams, another one the next item's.
//
// Each chunk of a row of x has its own power of two (e2m1_sm90.cuh).
//
// The kernel before that of `down` is that of gate and up, which lets it start when its own wait is over
// (RELEASES_LATE of gpu/ptx.cuh): the experts of all pairs are known, and the first weights are copied while it ends.
//
// Macros: N (rows of an expert's weight), K, COLUMNS (of the output), NUM_EXPERTS, CAPACITY (of members);
// IN_PAIRS (every block is one pair, of MOST_PAIRS, else counts and members have those of each expert);
// ROWS (8), TEAMS, STAGES; SHARED_BYTES; COUNT (which of dims counts the rows of x), TOP_K, ROWS_OF_PAIRS, GIVEN_STRIDE;
// HAS_BIAS (0 or 1); GATED; GELU_TANH, QUICK_GELU (0 or 1, else silu), LIMIT (0: none), UP_OFFSET.
#include "gpu/tensor_map.cuh"
#include "moe/e2m1_sm90.cuh"

namespace {

using namespace trtc;

constexpr int kTeamThreads = 128, kThreads = TEAMS * kTeamThreads;
constexpr int kWarpRows = 16, kTileRows = 64;
constexpr int kTileColumns = GATED ? kTileRows / 2 : kTileRows, kWarpColumns = kTileColumns / 4;
constexpr int kTiles = COLUMNS / kTileColumns;
static_assert(COLUMNS % kTileColumns == 0 && N == (GATED ? 2 : 1) * COLUMNS, "tiles are whole");

constexpr int kGroups = K / kGroup;
constexpr int kStepGroups = 2;  // multiplied before they are waited for
static_assert(K % (kStepGroups * kGroup) == 0, "steps are whole");
constexpr int kScaleStride = scale_stride(kGroups);
constexpr int kChunks = (kGroups + kChunkGroups - 1) / kChunkGroups;
constexpr int kChunkSteps = kChunkGroups / kStepGroups;
constexpr int kLastSteps = (kGroups - (kChunks - 1) * kChunkGroups) / kStepGroups;

constexpr int kStageBytes = kWarpRows * kChunkBytes, kStageScales = kWarpRows * kChunkGroups;
constexpr int kWarps = TEAMS * 4, kAhead = STAGES - 1;

// The operand of a group: the first numbers of all rows, then the second ones, as columns of one product. WGMMA
// takes cores of 8 rows of 16 bytes: here the even channels, then the odd ones, of eight rows after the other.
constexpr int kPartBytes = ROWS * kGroup, kGroupBytes = 2 * kPartBytes;
constexpr int kSums = ROWS / 2;  // a thread's

struct Shared {
  u8 weights[kWarps][STAGES][kStageBytes];  // in panels
  u8 operand[kGroups * kGroupBytes];
  unsigned long long full[kWarps][STAGES];  // barriers
  u8 scales[kWarps][STAGES][kStageScales];
  float x_scales[kChunks][ROWS];
  unsigned long long written[2], collected[2];  // barriers of the parts of every second item
  float parts[2][TEAMS][kSums][kTeamThreads];
  int pairs[ROWS];  // of the present block
#if IN_PAIRS
  int list[MOST_PAIRS];  // whose experts are here
  int num_blocks;
#else
  BlockList<ROWS, NUM_EXPERTS> blocks;
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as e2m1_sm90.py counts them");

#if IN_PAIRS
__device__ inline void list_blocks(Shared& shared, const int* experts, int num_pairs) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int count = 0;
  for (int first = 0; first < num_pairs; first += 32) {
    const bool is_here = first + lane < num_pairs && experts[first + lane] >= 0;
    const unsigned here = __ballot_sync(~0u, is_here);
    if (is_here) shared.list[count + __popc(here & ((1u << lane) - 1))] = first + lane;
    count += __popc(here);
  }
  if (lane == 0) shared.num_blocks = count;
}

// By a whole warp, as below.
__device__ inline Block find_block(const Shared& shared, const int* experts, const int*, int block) {
  return {experts[shared.list[block]], 0, 1};
}

__device__ inline int pair_of(const Shared& shared, const int*, int block, Block, int) {
  return shared.list[block];
}
__device__ inline int num_blocks(const Shared& shared) { return shared.num_blocks; }
#else
__device__ inline void list_blocks(Shared& shared, const int* counts, int) { shared.blocks.fill(counts); }

__device__ inline Block find_block(const Shared& shared, const int*, const int* counts, int block) {
  return shared.blocks.find(counts, block);
}

__device__ inline int pair_of(const Shared&, const int* members, int, Block found, int row) {
  return members[found.expert * CAPACITY + found.first + row];
}

__device__ inline int num_blocks(const Shared& shared) { return shared.blocks.num_blocks; }
#endif

// What a warp has on its way through its ring: the chunks of its team, item after item.
struct Stream {
  const TensorMap* map;  // a tile of it is eight rows, and the eight that are the second half of a warp's
  const u8* scale;
  const Shared& shared;
  const int *experts, *counts;
  int warp, item, end, chunk;
  unsigned weights, scales, full;  // of the first stage
  int block = -1, expert = 0, stage = 0;
  int first_eight = 0;        // of the rows of the present item
  const u8* own_scales = {};  // a lane's word of its row

  __device__ inline void ask_for_next() {
    if (item < end) {
      if (own_scales == nullptr) find_rows();
      copy();
      chunk += TEAMS;
      if (chunk >= kChunks) {
        chunk = warp / 4;
        ++item;
        own_scales = nullptr;
      }
    }
    commit_copies();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  __device__ inline void find_rows() {
    if (item / kTiles != block) {
      block = item / kTiles;
      expert = find_block(shared, experts, counts, block).expert;
    }
    const int lane = threadIdx.x % 32, row = lane / 2;
    const int first = expert * N + item % kTiles * kTileColumns + warp % 4 * kWarpColumns;
    first_eight = first / 8;
    // Rows 8 ... 15 are up's of gate's columns.
    const long long mine = first + (GATED && row >= 8 ? COLUMNS + row - 8 : row);
    own_scales = scale + mine * kScaleStride + lane % 2 * 4;
  }

  __device__ inline void copy() const {
    const int lane = threadIdx.x % 32, at = chunk * kChunkGroups;
    if (lane == 0) {
      const unsigned barrier = full + stage * sizeof(shared.full[0][0]);
      arrive_and_expect(barrier, kStageBytes);
      copy_tile(weights + stage * kStageBytes, map, barrier, chunk * kChunkBytes, 0, 0, first_eight);
    }
    if (kScaleStride % kChunkGroups == 0 || at + lane % 2 * 4 < kScaleStride) {
      copy_async_4(scales + stage * kStageScales + lane * 4, own_scales + at);
    }
  }
};

constexpr int kLoads = 4;  // that a thread has in flight

// Rows of x, as two E4M3 numbers a channel, into the operand. All threads of the block take part.
struct Given {
  Shared& shared;
  const Bf16* x;
  int rows;

  // Of eight channels: those of a row, and with those that its last chunk lacks, whole warps.
  static constexpr int kRuns = K / 8, kAllRuns = kChunks * 32;

  __device__ inline void store_all() const {
    for (int first = threadIdx.x; first < rows * kAllRuns; first += kLoads * kThreads) {
      uint4 runs[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) runs[i] = load(first + i * kThreads);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) store(first + i * kThreads, runs[i]);
    }
  }

  __device__ inline uint4 load(int index) const {
    const int run = index % kAllRuns;
    if (index >= rows * kAllRuns || run >= kRuns) return {0, 0, 0, 0};
    const long long row = shared.pairs[index / kAllRuns] / ROWS_OF_PAIRS;
    return load_now(reinterpret_cast<const uint4*>(x + row * GIVEN_STRIDE + run * 8));
  }

  // A warp has the runs of a chunk.
  __device__ inline void store(int index, uint4 loaded) const {
    if (index >= rows * kAllRuns) return;
    const ChannelScale scale(largest_of_warp(largest_bits(loaded, 0)));
    const int row = index / kAllRuns, run = index % kAllRuns;
    if (run % 32 == 0) shared.x_scales[run / 32][row] = scale.down;
    if (run >= kRuns) return;
    u8* to = shared.operand + run / 4 * kGroupBytes + row / 8 * 2 * kCoreBytes + row % 8 * 16 +
             run % 4 * 4;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {  // even channels, and odd ones
      const TwoParts parts(loaded, odd, scale.up);
      *reinterpret_cast<unsigned*>(to + odd * kCoreBytes) = parts.first;
      *reinterpret_cast<unsigned*>(to + kPartBytes + odd * kCoreBytes) = parts.second;
    }
  }
};

// A thread's sums of an item.
struct Products {
  const Shared& shared;
  int g, t;
  unsigned words[kChunkGroups];  // offsets in a stage of row g's words, which row g + 8 has kHalfBytes later
  float sums[kSums];

  static constexpr int kHalfBytes = 8 * kChunkBytes;

  __device__ inline Products(const Shared& shared, int lane) : shared(shared), g(lane / 4), t(lane % 4) {
#pragma unroll
    for (int i = 0; i < kChunkGroups; ++i) words[i] = g * kChunkBytes + (i ^ g) * 16 + t * 4;
  }

  __device__ inline void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
  }

  template <int kSteps>
  __device__ inline void add_chunk(const u8* weights, const u8* scales_of_rows, int chunk) {
    float d[2][kStepGroups][2 * kSums], chunk_sums[kSums] = {};
    unsigned a[2][kStepGroups][4];
    const uint2* by_row = reinterpret_cast<const uint2*>(scales_of_rows);
    const uint2 scales[2] = {by_row[g], by_row[g + 8]};
    const auto operand =
        operand_in_cores(shared_address(shared.operand) + chunk * kChunkGroups * kGroupBytes,
                         kCoreBytes, 2 * kCoreBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int turn = step % 2;
#pragma unroll
      for (int i = 0; i < kStepGroups; ++i) unpack(a[turn][i], weights, kStepGroups * step + i);
      begin_products();
#pragma unroll
      for (int i = 0; i < kStepGroups; ++i) {
        const int at = (kStepGroups * step + i) * kGroupBytes;
        multiply_registers_by_cores<2 * ROWS>(d[turn][i], a[turn][i], further(operand, at), 0);
      }
      commit_products();
      if (step > 0) {
        wait_for_products<1>();
        add_step(chunk_sums, d[turn ^ 1], scales, step - 1);
      }
    }
    wait_for_products<0>();
    add_step(chunk_sums, d[(kSteps - 1) % 2], scales, kSteps - 1);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float* x_scales = shared.x_scales[chunk] + i * 2 + 2 * t;
      const float2 by = *reinterpret_cast<const float2*>(x_scales);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] += chunk_sums[i + j] * (j % 2 ? by.y : by.x);
    }
  }

  __device__ inline void unpack(unsigned (&a)[4], const u8* weights, int group) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u8* from = weights + words[group] + half * kHalfBytes;
      const unsigned word = *reinterpret_cast<const unsigned*>(from);
      a[half] = low_as_e4m3(word);
      a[2 + half] = high_as_e4m3(word);
    }
  }

  // chunk_sums += d times the scales of their rows.
  static __device__ inline void add_step(float (&chunk_sums)[kSums],
                                         float (&d)[kStepGroups][2 * kSums], const uint2 (&scales)[2],
                                         int step) {
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      settle(d[i]);
      const int number = kStepGroups * step + i;
      const float by[2] = {e8m0(scales[0], number), e8m0(scales[1], number)};
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        chunk_sums[j] += (d[i][j] + d[i][kSums + j]) * by[j % 4 / 2];
      }
    }
  }
};

// The sums of an item on their way from the teams to the one that collects them. There is room for those
// of two items: a team waits for the collector of the one before the last.
struct Parts {
  Shared& shared;
  int team;

  static __device__ inline void make_barriers(Shared& shared) {
    for (int i = 0; i < 2; ++i) {
      make_barrier(shared_address(&shared.written[i]), kWarps);
      make_barrier(shared_address(&shared.collected[i]), 4);
    }
  }

  // Args: number: of the item, counted from the thread block's first.
  __device__ inline void give(const Products& products, int number) const {
    if (number >= 2) wait_at(shared_address(&shared.collected[number % 2]), (number / 2 - 1) & 1);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      shared.parts[number % 2][team][i][threadIdx.x % kTeamThreads] = products.sums[i];
    }
    arrive_with_warp(shared.written[number % 2]);
  }

  __device__ inline bool collects(int number) const { return number % TEAMS == team; }

  __device__ inline void collect(Products& products, int number) const {
    wait_at(shared_address(&shared.written[number % 2]), (number / 2) & 1);
    products.clear();
#pragma unroll
    for (int from = 0; from < TEAMS; ++from) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        products.sums[i] += shared.parts[number % 2][from][i][threadIdx.x % kTeamThreads];
      }
    }
    arrive_with_warp(shared.collected[number % 2]);
  }

  static __device__ inline void arrive_with_warp(unsigned long long& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(&barrier));
  }
};

// What a team stores of an item: its rows are pairs of the block, and a thread has two rows of a tile.
struct Output {
  const float* bias;
#if GATED
  Bf16* out;
#else
  float* out;
#endif
  int column = 0;
  float offset[2] = {0.f, 0.f};

  // Long before the sums are there.
  __device__ inline void begin(int expert, int tile) {
    const int warp = static_cast<int>(threadIdx.x) % kTeamThreads / 32;
    column = tile * kTileColumns + warp * kWarpColumns + static_cast<int>(threadIdx.x) % 32 / 4;
#if HAS_BIAS
    const float* bias_at = bias + static_cast<long long>(expert) * N + column;
    offset[0] = load_early(bias_at);
    offset[1] = load_early(bias_at + (GATED ? COLUMNS : 8));
#endif
  }

  __device__ inline void store(const Products& products, const int* pairs, int found) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = i * 2 + 2 * products.t + j;
        if (row >= found) continue;
        const float first = products.sums[i + j] + offset[0];
        const float second = products.sums[i + 2 + j] + offset[1];
        auto* const to = out + static_cast<long long>(pairs[row]) * COLUMNS + column;
#if GATED
        constexpr Gate kGate{GELU_TANH == 1, QUICK_GELU == 1, LIMIT, UP_OFFSET};
        *to = round_to<Bf16>(kGate(first, second));
#else
        to[0] = first;
        to[8] = second;
#endif
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) experts_e2m1(
    const Bf16* __restrict__ given, const u8* __restrict__ scale,
#if HAS_BIAS
    const float* __restrict__ bias,
#endif
#if IN_PAIRS
    const int* __restrict__ experts,
#else
    const int* __restrict__ counts, const int* __restrict__ members,
#endif
    const int* __restrict__ dims,
#if GATED
    Bf16* out,
#else
    float* out,
#endif
    const TensorMap* __restrict__ map) {
#if !HAS_BIAS
  const float* bias = nullptr;
#endif
#if IN_PAIRS
  const int *counts = nullptr, *members = nullptr;
#else
  const int* experts = nullptr;
#endif
  extern __shared__ __align__(1024) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int lane = threadIdx.x % 32;
  // The same for all lanes, and known to be.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), team = warp / 4;
  if (lane < STAGES) make_barrier(shared_address(&shared.full[warp][lane]), 1);
  if (threadIdx.x == 0) Parts::make_barriers(shared);
  publish_to_products();  // and to TMA
  if (threadIdx.x == 0) prefetch_map(map);
  let_next_kernel_start();
  if (GATED) wait_for_earlier_kernels();
  list_blocks(shared, IN_PAIRS ? experts : counts, dims[COUNT] * TOP_K);
  __syncthreads();
  const long long num_items = static_cast<long long>(num_blocks(shared)) * kTiles;
  const int begin = static_cast<int>(num_items * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(num_items * (blockIdx.x + 1) / gridDim.x);

  Stream stream{map, scale, shared, experts, counts, warp, begin, end, team,
                shared_address(shared.weights[warp]), shared_address(shared.scales[warp]),
                shared_address(shared.full[warp])};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) stream.ask_for_next();
  if (!GATED) wait_for_earlier_kernels();
  Products products(shared, lane);
  Output output{bias, out};
  const Parts parts{shared, team};
  int stage = 0, item = begin;
  unsigned parity = 0;
  while (item < end) {
    const int block = item / kTiles;
    const Block found = find_block(shared, experts, counts, block);
    const int after = (block + 1) * kTiles < end ? (block + 1) * kTiles : end;
    __syncthreads();  // The products of the block before are done.
    const int row = threadIdx.x;
    if (row < found.found) shared.pairs[row] = pair_of(shared, members, block, found, row);
    __syncthreads();
    Given{shared, given, found.found}.store_all();
    publish_to_products();
    __syncthreads();
    for (; item < after; ++item) {
      const int number = item - begin;
      if (parts.collects(number)) output.begin(found.expert, item % kTiles);
      products.clear();
      for (int chunk = team; chunk < kChunks; chunk += TEAMS) {
        // All lanes have read the stage before, which takes another chunk.
        __syncwarp();
        stream.ask_for_next();
        wait_for_copies<kAhead>();
        __syncwarp();
        wait_at(shared_address(&shared.full[warp][stage]), parity);
        const u8 *weights = shared.weights[warp][stage], *scales = shared.scales[warp][stage];
        if (kLastSteps == kChunkSteps || chunk < kChunks - 1) {
          products.add_chunk<kChunkSteps>(weights, scales, chunk);
        } else {
          products.add_chunk<kLastSteps>(weights, scales, chunk);
        }
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      parts.give(products, number);
      if (parts.collects(number)) {
        parts.collect(products, number);
        output.store(products, shared.pairs, found.found);
      }
    }
  }
}
