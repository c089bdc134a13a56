// A product of experts with E2M1 weights for some rows of each expert:
//
//     GATED   out[pair] = activation(gate) * (up + UP_OFFSET) of x[pair], in bf16
//     else    out[pair] = x[pair] @ weight.T + bias, in f32
//
// The pairs of an expert fall into blocks of up to BLOCK_ROWS, whose rows e2m1_operand_sm90.cu has made the
// second operand; the weight falls into tiles of TEAMS * 64 rows. A thread block takes a run of items,
// (block, tile) in that order, of as much work as the other thread blocks' (Share), in chunks of 256 channels:
//
//   a warp       copies the weights of the tile, by TMA, and the operand of the block, in one piece, into
//                STAGES stages
//   TEAMS teams  of 128 threads unpack the weights of 64 rows each and run WGMMA: both numbers of x into the
//                same sums, a group of channels at a time, which are then added up times the weights' scales
//
// Producer and teams synchronise by mbarriers: "full" when a chunk has been copied, "empty" when all teams have
// read it. The next item is copied while sums are stored. The order of a sum depends on nothing but K.
//
// The kernel before, which makes the operand, lets this one start when its own wait is over (RELEASES_LATE of
// gpu/ptx.cuh): counts and members are there, and the first weights are copied while it runs.
//
// Macros: N (rows of an expert's weight), K, COLUMNS (of the output), NUM_EXPERTS, CAPACITY (of members);
// BLOCK_ROWS, TEAMS, STAGES, SHARED_BYTES, PRODUCER_REGISTERS, CONSUMER_REGISTERS; HAS_BIAS (0 or 1); GATED;
// GELU_TANH, QUICK_GELU (0 or 1, else silu), LIMIT (0: none), UP_OFFSET.
#include "gpu/tensor_map.cuh"
#include "gpu/turn.cuh"
#include "moe/e2m1_items_sm90.cuh"

namespace {

using namespace trtc;

constexpr int kLastGroups = kGroups - (kChunks - 1) * kChunkGroups;
constexpr int kRowBytes = 2 * kGroup;  // of the operand, a group's
constexpr int kOperandBytes = kChunkGroups * kRowBytes * BLOCK_ROWS;

struct Shared {
  u8 weights[STAGES][kTileBytes];  // in panels
  u8 operand[STAGES][kOperandBytes];
  unsigned long long full[STAGES], empty[STAGES];
  Blocks blocks;
  int costs[NUM_EXPERTS];  // of a tile of all of an expert's blocks, and those of the experts before
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// What a tile takes for its weights alone, in units of a row of x (H200, gpt-oss-20b's experts).
constexpr int kTileCost = 40;

// What it takes by so many pairs.
__device__ inline int cost_of(int pairs) { return kTileCost + operand_rows(pairs); }

// The items of a thread block: number begin ... end - 1.
struct Share {
  int begin, end;

  __device__ inline Share(const Shared& shared, const int* counts)
      : begin(at(shared, counts, blockIdx.x)), end(at(shared, counts, blockIdx.x + 1)) {}

  // By the block's first warp, before a share is computed.
  static __device__ inline void add_up_costs(Shared& shared, const int* counts) {
    if (threadIdx.x >= 32) return;
    add_up(shared.costs, [&](int expert) {
      const int pairs = counts[expert], rest = pairs % BLOCK_ROWS;
      return pairs / BLOCK_ROWS * cost_of(BLOCK_ROWS) + (rest > 0 ? cost_of(rest) : 0);
    });
  }

  // The first item that begins after so many of gridDim.x equal shares of all costs. By a whole warp.
  static __device__ inline int at(const Shared& shared, const int* counts, int share) {
    const int all = shared.costs[NUM_EXPERTS - 1];
    const long long total = static_cast<long long>(all) * kTiles * share;
    int cost = static_cast<int>(total / gridDim.x);
    const int expert = ends_up_to(shared.costs, cost / kTiles);
    if (expert == NUM_EXPERTS) return shared.blocks.num_blocks * kTiles;
    cost -= (expert > 0 ? shared.costs[expert - 1] : 0) * kTiles;
    constexpr int kBlockCost = (kTileCost + BLOCK_ROWS) * kTiles;
    const int block = cost / kBlockCost, left = counts[expert] - block * BLOCK_ROWS;
    const int tile_cost = cost_of(left < BLOCK_ROWS ? left : BLOCK_ROWS);
    const int tile = (cost % kBlockCost + tile_cost - 1) / tile_cost;
    return (shared.blocks.begin(expert) + block) * kTiles + tile;
  }
};

// Copies the operands of all items, a chunk into a stage; one warp.
struct Producer {
  Shared& shared;
  const int* counts;
  const u8* operand;
  const TensorMap* map;

  __device__ inline void produce() const {
    const Share share(shared, counts);
    if (share.begin == share.end) return;
    copy_first_weights(Item(shared.blocks, counts, share.begin));
    wait_for_earlier_kernels();
    Turn<STAGES> turn;
    for (int number = share.begin; number < share.end; ++number) {
      const Item item(shared.blocks, counts, number);
      for (int chunk = 0; chunk < kChunks; ++chunk, turn.advance()) {
        if (number > share.begin || chunk >= kFirst) {
          wait_at(shared_address(&shared.empty[turn.stage]), turn.parity ^ 1);
          copy_weights(item, chunk, turn.stage);
        }
        copy_rows(item, chunk, turn.stage);
      }
    }
  }

 private:
  static constexpr int kFirst = STAGES < kChunks ? STAGES : kChunks;

  // While the operand is being made.
  __device__ inline void copy_first_weights(const Item& item) const {
    for (int chunk = 0; chunk < kFirst; ++chunk) copy_weights(item, chunk, chunk);
  }

  __device__ inline void copy_weights(const Item& item, int chunk, int stage) const {
    if (threadIdx.x % 32 == 0) {
      const unsigned full = shared_address(&shared.full[stage]);
      arrive_and_expect(full, kTileBytes + row_bytes(item, chunk));
      copy_tile(shared_address(shared.weights[stage]), map, full, chunk * kChunkBytes, 0, 0, item.map_row());
    }
    __syncwarp();
  }

  __device__ inline void copy_rows(const Item& item, int chunk, int stage) const {
    if (threadIdx.x % 32 == 0) {
      const long long first = static_cast<long long>(item.block) * kGroups * kRowBytes * BLOCK_ROWS;
      copy_bytes(shared_address(shared.operand[stage]), operand + first + chunk * kChunkGroups * group_bytes(item),
                 row_bytes(item, chunk), shared_address(&shared.full[stage]));
    }
    __syncwarp();
  }

  // Of the operand, a chunk's.
  static __device__ inline int row_bytes(const Item& item, int chunk) {
    return (chunk < kChunks - 1 ? kChunkGroups : kLastGroups) * group_bytes(item);
  }
  static __device__ inline int group_bytes(const Item& item) { return operand_rows(item.pairs.found) * kRowBytes; }
};

// A thread's weights of a chunk: of two rows, eight channels of each group.
struct Weights {
  unsigned words[kChunkGroups][2];

  // Args: rows: of the warp.
  __device__ inline Weights(const u8* rows, int g, int t) {
#pragma unroll
    for (int group = 0; group < kChunkGroups; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u8* const from = rows + panel_offset(8 * half + g, group) + t * 4;
        words[group][half] = *reinterpret_cast<const unsigned*>(from);
      }
    }
  }

  __device__ inline void unpack(unsigned (&a)[4], int group) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[half] = low_as_e4m3(words[group][half]);
      a[2 + half] = high_as_e4m3(words[group][half]);
    }
  }
};

// Adds the products of a chunk, of kDeep groups, by kRows rows of x.
template <int kRows, int kDeep>
__device__ inline void add_chunk(float (&sums)[kRows / 2], const Weights& weights, unsigned operand,
                                 const uint2 (&scales)[2]) {
  float d[2][kRows / 2];
  unsigned a[2][4];
  const auto rows = operand_in_cores(operand, kCoreBytes, 2 * kCoreBytes);
  const auto add_group = [&](const float(&group_sums)[kRows / 2], int group) {
    const float by[2] = {e8m0(scales[0], group), e8m0(scales[1], group)};
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] += group_sums[i] * by[i % 4 / 2];
  };
#pragma unroll
  for (int group = 0; group < kDeep; ++group) {
    const int turn = group % 2;
    weights.unpack(a[turn], group);
    begin_products();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const unsigned at = (2 * group + part) * kRows * kGroup;
      multiply_registers_by_cores<kRows>(d[turn], a[turn], further(rows, at), part);
    }
    commit_products();
    if (group > 0) {
      wait_for_products<1>();
      settle(d[turn ^ 1]);
      add_group(d[turn ^ 1], group - 1);
    }
  }
  wait_for_products<0>();
  settle(d[(kDeep - 1) % 2]);
  add_group(d[(kDeep - 1) % 2], kDeep - 1);
}

struct Output : Destination {
  const float* x_scale;
  float scales[kLaneRows] = {};  // of the rows of `pairs`

  __device__ inline Output(const Destination& destination, const float* x_scale)
      : Destination(destination), x_scale(x_scale) {}

  // Long before the sums are there.
  __device__ inline void begin(const Item& item, int column_of_thread) {
    Destination::begin(item, column_of_thread);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) scales[i] = x_scale[item.block * BLOCK_ROWS + lane_row(i)];
  }

  // All lanes of a warp.
  template <int kRows>
  __device__ inline void store(const float (&sums)[kRows / 2], int t) const {
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 2 * i + 2 * t + j;
        const float by = __shfl_sync(~0u, scales[i / 16], row % 32);
        const int pair = __shfl_sync(~0u, pairs[i / 16], row % 32);
        if (row >= found || column >= COLUMNS) continue;
        const float first = sums[i + j] * by + offset[0], second = sums[i + 2 + j] * by + offset[1];
        auto* const to = out + static_cast<long long>(pair) * COLUMNS + column;
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

// An item, by kRows rows of x; all teams.
template <int kRows>
__device__ inline void consume(Shared& shared, Turn<STAGES>& turn, const Item& item, const u8* scale, Output& output) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = item.tile * kTileColumns + warp * kWarpColumns + g;
  const RowScales row_scales(scale, item, column);
  output.begin(item, column);
  float sums[kRows / 2] = {};
  uint2 scales[2], next[2];
  row_scales.load(next, 0);
  for (int chunk = 0; chunk < kChunks; ++chunk, turn.advance()) {
    scales[0] = next[0];
    scales[1] = next[1];
    if (chunk < kChunks - 1) row_scales.load(next, chunk + 1);
    wait_at(shared_address(&shared.full[turn.stage]), turn.parity);
    const Weights weights(shared.weights[turn.stage] + warp * kWarpBytes, g, t);
    const unsigned operand = shared_address(shared.operand[turn.stage]);
    if (kLastGroups == kChunkGroups || chunk < kChunks - 1) {
      add_chunk<kRows, kChunkGroups>(sums, weights, operand, scales);
    } else {
      add_chunk<kRows, kLastGroups>(sums, weights, operand, scales);
    }
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.empty[turn.stage]));
  }
  output.store<kRows>(sums, t);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) experts_e2m1_tiles(
    const u8* __restrict__ operand, const float* __restrict__ x_scale, const u8* __restrict__ scale,
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
  if (threadIdx.x < STAGES) {
    make_barrier(shared_address(&shared.full[threadIdx.x]), 1);
    make_barrier(shared_address(&shared.empty[threadIdx.x]), kConsumers / 32);
  }
  publish_to_products();  // and to TMA
  if (threadIdx.x == 0) prefetch_map(map);
  let_next_kernel_start();
  shared.blocks.fill(counts);
  Share::add_up_costs(shared, counts);
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < kConsumers + 32) Producer{shared, counts, operand, map}.produce();
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  wait_for_earlier_kernels();
  Output output({bias, members, out}, x_scale);
  Turn<STAGES> turn;
  const Share share(shared, counts);
  for (int number = share.begin; number < share.end; ++number) {
    const Item item(shared.blocks, counts, number);
    switch (operand_rows(item.pairs.found)) {
      case 16: consume<16>(shared, turn, item, scale, output); break;
      case 32: consume<32>(shared, turn, item, scale, output); break;
      case 48: consume<48>(shared, turn, item, scale, output); break;
      default: consume<64>(shared, turn, item, scale, output);
    }
  }
}
