// A product of experts with E2M1 weights for many rows of each expert:
//
//     GATED   out[pair] = activation(gate) * (up + UP_OFFSET) of x[pair], in bf16
//     else    out[pair] = x[pair] @ weight.T + bias, in f32
//
// The pairs of an expert fall into blocks of up to BLOCK_ROWS; the weight falls into tiles of TEAMS * 64 rows. Thread
// blocks take items, (block, tile) in that order, in turn: those that run at the same time share weights and rows of
// x in the L2 cache.
//
//   4 warps      copy rows of x, 64 channels at a time, into X_STAGES panels; one of them has the tile's weights
//                copied by TMA, 256 channels at a time, into WEIGHT_STAGES panels
//   TEAMS teams  of 128 threads make bf16 numbers of the weights of 64 rows each, times their scales, and run WGMMA
//
// Weights are the first operand, from registers. A power of two times an E2M1 number is exact in bf16, so all of K is
// one sum. Copiers and teams synchronise by mbarriers: "full" when a stage has been copied, "empty" when all teams
// have read it. The next item is copied while sums are stored. The order of a sum depends on nothing but K.
//
// Macros: N (rows of an expert's weight), K, COLUMNS (of the output), NUM_EXPERTS, CAPACITY (of members);
// ROWS_OF_PAIRS, GIVEN_STRIDE; BLOCK_ROWS, ROW_STEP (products are by a multiple of it), TEAMS, X_STAGES, WEIGHT_STAGES,
// SHARED_BYTES, PRODUCER_REGISTERS, CONSUMER_REGISTERS; HAS_BIAS (0 or 1); GATED; GELU_TANH, QUICK_GELU (0 or 1, else
// silu), LIMIT (0: none), UP_OFFSET.
#include "gpu/tensor_map.cuh"
#include "gpu/turn.cuh"
#include "moe/e2m1_items_sm90.cuh"

namespace {

using namespace trtc;

constexpr int kStepChannels = 64, kStepGroups = kStepChannels / kGroup;
constexpr int kSteps = K / kStepChannels, kChunkSteps = kChunkGroups / kStepGroups;
constexpr int kLastSteps = kSteps - (kChunks - 1) * kChunkSteps;  // of the last chunk
static_assert(K % kStepChannels == 0);
constexpr int kXBytes = BLOCK_ROWS * kStepChannels * 2;
static_assert(BLOCK_ROWS % ROW_STEP == 0);

struct Shared {
  alignas(1024) u8 x[X_STAGES][kXBytes];  // panels
  u8 weights[WEIGHT_STAGES][kTileBytes];  // panels
  unsigned long long x_full[X_STAGES], x_empty[X_STAGES];
  unsigned long long weights_full[WEIGHT_STAGES], weights_empty[WEIGHT_STAGES];
  Blocks blocks;
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// Copies the operands of all items.
struct Producer {
  Shared& shared;
  const Bf16* given;
  const int *counts, *members;
  const TensorMap* map;
  int thread;
  Turn<X_STAGES> x = {}, landed = {};
  Turn<WEIGHT_STAGES> weights = {};
  int in_flight = 0;  // stages that are being copied

  static constexpr int kPieces = kStepChannels * 2 / 16;  // of 16 bytes, that a row has in a stage
  static constexpr int kRowsAtOnce = kProducers / kPieces, kMine = BLOCK_ROWS / kRowsAtOnce;
  static constexpr int kMostInFlight = kChunkSteps - 1;
  static_assert(BLOCK_ROWS % kRowsAtOnce == 0 && GIVEN_STRIDE % 8 == 0);
  // Teams empty a stage when they have the next one.
  static_assert(X_STAGES >= kMostInFlight + 2);

  __device__ inline void produce() {
    const int num_items = shared.blocks.num_blocks * kTiles;
    for (int number = blockIdx.x; number < num_items; number += gridDim.x) {
      const Item item(shared.blocks, counts, number);
      unsigned rows[kMine];  // where this thread's rows of x begin, in units of 16 bytes
      find_rows(rows, item.pairs);
      for (int step = 0; step < kSteps; ++step) {
        if (step % kChunkSteps == 0) copy_weights(step / kChunkSteps, item.map_row());
        copy_x(rows, item.pairs.found, step);
        if (in_flight > kMostInFlight) publish<kMostInFlight>();
      }
      // The next item's first weights wait for teams that wait for these.
      while (in_flight > 0) publish<0>();
    }
  }

  __device__ inline void find_rows(unsigned (&rows)[kMine], const Block& pairs) const {
    const int* const from = members + pairs.expert * CAPACITY + pairs.first;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = thread / kPieces + i * kRowsAtOnce;
      rows[i] = row < pairs.found ? static_cast<unsigned>(from[row] / ROWS_OF_PAIRS) * (GIVEN_STRIDE / 8) : 0;
    }
  }

  __device__ inline void copy_weights(int chunk, int map_row) {
    if (thread == 0) {
      wait_at(shared_address(&shared.weights_empty[weights.stage]), weights.parity ^ 1);
      const unsigned full = shared_address(&shared.weights_full[weights.stage]);
      arrive_and_expect(full, kTileBytes);
      copy_tile(shared_address(shared.weights[weights.stage]), map, full, chunk * kChunkBytes, 0, 0, map_row);
    }
    __syncwarp();
    weights.advance();
  }

  __device__ inline void copy_x(const unsigned (&rows)[kMine], int found, int step) {
    const int piece = thread % kPieces;
    const auto* const from = reinterpret_cast<const uint4*>(given) + step * kPieces + piece;
    wait_at(shared_address(&shared.x_empty[x.stage]), x.parity ^ 1);
    const unsigned to = shared_address(shared.x[x.stage]) + panel_offset(thread / kPieces, piece);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = thread / kPieces + i * kRowsAtOnce;
      if (row < found) copy_async_16(to + i * kRowsAtOnce * kStepChannels * 2, from + rows[i], 16);
    }
    commit_copies();
    ++in_flight;
    x.advance();
  }

  // The next stage that all but the last kLeft of this thread's copies have filled. That it says so itself, not its
  // copies, keeps a fence from those who multiply.
  template <int kLeft>
  __device__ inline void publish() {
    wait_for_copies<kLeft>();
    publish_to_products();
    arrive(shared_address(&shared.x_full[landed.stage]));
    landed.advance();
    --in_flight;
  }
};

// Two E2M1 numbers, the low half of a byte first, times a power of two.
__device__ inline unsigned byte_as_bf16(unsigned byte, unsigned power) {
  // Exponent and mantissa where a bf16 has them are the number times 2^-126, subnormals too.
  const unsigned both = byte * 0x01001000u;
  const unsigned tiny = (both & 0x80008000u) | (both >> 6 & 0x01c001c0u);
  constexpr unsigned kMinusZeros = 0x80008000u, kHuge = 0x7e807e80u;  // 2^126
  return multiply_add_bf16(multiply_add_bf16(tiny, kHuge, kMinusZeros), power, kMinusZeros);
}

// 2^(scale - 127) of the byte of that number, twice.
__device__ inline unsigned power_of(uint2 scales, int number) {
  const unsigned word = number < 4 ? scales.x : scales.y;
  return (word >> number % 4 * 8 & 255u) * 0x00800080u;
}

// A thread's weights of 16 channels: of rows g and g + 8 of its warp.
struct Weights {
  uint2 words[2];

  // Args: row: address of row g, with the place of its first 16 bytes; part: of 16 channels.
  __device__ inline void load(unsigned row, int part) {
    const unsigned at = (row ^ part / 2 << 4) + part % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) words[half] = load_shared_8(at + half * 8 * kChunkBytes);
  }

  // Of lane 4g + t the channels 2t, 2t + 1 and 8 more, times the powers of both rows.
  __device__ inline void unpack(unsigned (&a)[4], const unsigned (&powers)[2], unsigned selector) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[half] = byte_as_bf16(__byte_perm(words[half].x, 0, selector), powers[half]);
      a[2 + half] = byte_as_bf16(__byte_perm(words[half].y, 0, selector), powers[half]);
    }
  }
};

struct Output : Destination {
  // All lanes of a warp.
  template <int kRows>
  __device__ inline void store(const float (&sums)[kRows / 2]) const {
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
      store_eight(2 * i, {sums[i], sums[i + 1]}, {sums[i + 2], sums[i + 3]});
    }
  }

#if GATED
  // Eight rows: of lane 4g + t the sums of rows 2t and 2t + 1, and where they go the columns 2t and 2t + 1 of row g.
  __device__ inline void store_eight(int first, float2 gate, float2 up) const {
    constexpr Gate kGate{GELU_TANH == 1, QUICK_GELU == 1, LIMIT, UP_OFFSET};
    const unsigned of_column = pack_bf16(kGate(gate.x + offset[0], up.x + offset[1]),
                                         kGate(gate.y + offset[0], up.y + offset[1]));
    const unsigned of_row = transpose_matrix(of_column);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long pair = __shfl_sync(~0u, pairs[first / 32], first % 32 + g);
    if (first + g < found && column < COLUMNS) {
      *reinterpret_cast<unsigned*>(out + pair * COLUMNS + (column - g + 2 * t)) = of_row;
    }
  }
#else
  // Eight rows: of lane 4g + t rows 2t and 2t + 1.
  __device__ inline void store_eight(int first, float2 low, float2 high) const {
    const int row = first + static_cast<int>(threadIdx.x) % 4 * 2;
    const float sums[2][2] = {{low.x, high.x}, {low.y, high.y}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const long long pair = __shfl_sync(~0u, pairs[first / 32], row % 32 + i);
      if (row + i >= found || column >= COLUMNS) continue;
      float* const to = out + pair * COLUMNS + column;
      to[0] = sums[i][0] + offset[0];
      to[8] = sums[i][1] + offset[1];
    }
  }
#endif
};

struct Consumer {
  Shared& shared;
  const u8* scale;
  Output output;
  int warp, g, t;
  Turn<X_STAGES> x = {};
  Turn<WEIGHT_STAGES> weights = {};

  // An item, by kRows rows of x; all teams.
  template <int kRows>
  __device__ inline void consume(const Item& item) {
    const int column = item.tile * kTileColumns + warp * kWarpColumns + g;
    const RowScales row_scales(scale, item, column);
    const unsigned selector = 0x4440 | t;
    float sums[kRows / 2] = {};
    unsigned a[2][2][4];  // of two groups, two products each
    uint2 scales[2], next[2];
    row_scales.load(next, 0);
    int previous = -1;
    for (int chunk = 0; chunk < kChunks; ++chunk, weights.advance()) {
      scales[0] = next[0];
      scales[1] = next[1];
      if (chunk < kChunks - 1) row_scales.load(next, chunk + 1);
      wait_at(shared_address(&shared.weights_full[weights.stage]), weights.parity);
      const unsigned row =
          shared_address(shared.weights[weights.stage]) + warp * kWarpBytes + panel_offset(g, 0);
      Weights words;
      words.load(row, 0);
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step) {
        if (chunk == kChunks - 1 && step >= kLastSteps) break;
        wait_at(shared_address(&shared.x_full[x.stage]), x.parity);
        const auto panel = operand_in_panels(shared_address(shared.x[x.stage]), 0);
#pragma unroll
        for (int i = 0; i < kStepGroups; ++i) {
          const int group = step * kStepGroups + i;
          const unsigned powers[2] = {power_of(scales[0], group), power_of(scales[1], group)};
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            words.unpack(a[i][part], powers, selector);
            if (2 * group + part + 1 < 2 * kChunkGroups) words.load(row, 2 * group + part + 1);
          }
          begin_products();
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            multiply_registers_by_rows<Bf16, kRows>(sums, a[i][part], further(panel, i * 64 + part * 32));
          }
          commit_products();
          wait_for_products<1>();
          if (i == 0) release(previous);
        }
        previous = x.stage;
        x.advance();
      }
      release_weights();
    }
    output.begin(item, column);
    wait_for_products<0>();
    settle(sums);
    release(previous);
    output.store<kRows>(sums);
  }

  // The products that read a stage are done.
  __device__ inline void release(int stage) const {
    __syncwarp();
    if (stage >= 0 && threadIdx.x % 32 == 0) arrive(shared_address(&shared.x_empty[stage]));
  }

  __device__ inline void release_weights() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.weights_empty[weights.stage]));
  }

  template <int kRows>
  __device__ inline void consume_rows(const Item& item) {
    if constexpr (kRows < BLOCK_ROWS) {
      if (item.pairs.found > kRows) return consume_rows<kRows + ROW_STEP>(item);
    }
    consume<kRows>(item);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) experts_e2m1_wide(
    const Bf16* __restrict__ given, const u8* __restrict__ scale,
#if HAS_BIAS
    const float* __restrict__ bias,
#endif
    const int* __restrict__ counts, const int* __restrict__ members,
#if GATED
    Bf16* out,
#else
    float* out,
#endif
    const TensorMap* __restrict__ map) {
#if !HAS_BIAS
  const float* bias = nullptr;
#endif
  extern __shared__ __align__(1024) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x < X_STAGES) {
    make_barrier(shared_address(&shared.x_full[threadIdx.x]), kProducers);
    make_barrier(shared_address(&shared.x_empty[threadIdx.x]), kConsumers / 32);
  }
  if (threadIdx.x < WEIGHT_STAGES) {
    make_barrier(shared_address(&shared.weights_full[threadIdx.x]), 1);
    make_barrier(shared_address(&shared.weights_empty[threadIdx.x]), kConsumers / 32);
  }
  publish_to_products();  // and to TMA
  if (threadIdx.x == 0) prefetch_map(map);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  shared.blocks.fill(counts);
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    give_registers<PRODUCER_REGISTERS>();
    Producer{shared, given, counts, members, map, static_cast<int>(threadIdx.x) - kConsumers}.produce();
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  const int lane = threadIdx.x % 32;
  // The same for all lanes, and known to be.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  Consumer consumer{shared, scale, {{bias, members, out}}, warp, lane / 4, lane % 4};
  const int num_items = shared.blocks.num_blocks * kTiles;
  for (int number = blockIdx.x; number < num_items; number += gridDim.x) {
    consumer.consume_rows<ROW_STEP>(Item(shared.blocks, counts, number));
  }
}
