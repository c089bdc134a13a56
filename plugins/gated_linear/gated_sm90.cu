// out = quantize(activation(x @ gate.T) * (x @ up.T)) of E4M3 for many rows, on the tensor cores of
// sm_90a: neither product is written to global memory. BY_ROWS: rows of x have scales of their own, and out is
// what will be quantised, in bf16.
//
// A tile is 128 rows and 128 columns of out, so 256 of the products: 128 of gate and the same of up.
// The two blocks of a cluster take tiles of the same columns, one below the other; each copies half of
// the weight's rows, for both. Clusters are persistent, with a stride over the tiles. In a block
//
//   a warp      copies x and the weight by TMA in steps of 128 bytes of K, into STAGES panels of each
//   8 warps     run WGMMA, 64 rows each group of four, and write their part of out
//
// Producer and consumers synchronise by mbarriers: "full" when a step has been copied, "empty" when
// the WGMMAs of both blocks have read it. The next tile is copied while a group makes out. The order of a
// sum depends on nothing but K.
//
// Macros: K, I; X_STRIDE, OUT_STRIDE; GELU_TANH (else silu); COUNT (which of dims counts the rows);
// STAGES; GROUP (see Tiles); CLUSTER (2), PROGRAMS (blocks); SHARED_BYTES; BY_ROWS (0 or 1), ROW_SCALE_STRIDE.
#include "gpu/activation.cuh"
#include "gpu/cluster.cuh"
#include "gpu/hopper.cuh"
#include "gpu/tensor_map.cuh"
#include "gpu/turn.cuh"

namespace trtc {

constexpr int kTileRows = 128, kTileColumns = 128;
constexpr int kClusterRows = CLUSTER * kTileRows;
constexpr int kColumnTiles = I / kTileColumns;
constexpr int kDepth = 128;  // bytes of K in a step
constexpr int kSteps = K / kDepth;
constexpr int kPanelBytes = 128 * kDepth;
constexpr int kStepBytes = 3 * kPanelBytes;  // x, gate and up
constexpr int kConsumers = 256, kProducers = 128;  // threads, of which one warp of producers works
constexpr int kSums = 128;  // a thread's: half of them gate's, then up's
static_assert(CLUSTER == 2, "one block copies gate, one up");
static_assert(I % kTileColumns == 0 && K % kDepth == 0);

using Gated = GatedUnit<GELU_TANH>;

struct Shared {
  alignas(1024) unsigned char x[STAGES][kPanelBytes];
  unsigned char weight[STAGES][2][kPanelBytes];  // gate, up
  Factors factors[2][2][kTileColumns];  // by group, double-buffered, in the order of a panel's rows
  unsigned long long full[STAGES], empty[STAGES];
  TensorMap maps[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// The tiles of a cluster, one after another. All are numbered down GROUP tiles before the next
// columns: clusters that run at the same time then share rows of x and of the weight in L2.
struct Tiles {
  int row_tiles, number;

  __device__ explicit Tiles(int num_rows)
      : row_tiles((num_rows + kClusterRows - 1) / kClusterRows), number(blockIdx.x / CLUSTER) {}
  __device__ bool inside() const { return number < row_tiles * kColumnTiles; }
  __device__ void advance() { number += PROGRAMS / CLUSTER; }

  __device__ int row() const { return (first() + within() % height()) * kClusterRows; }
  __device__ int column() const { return within() / height() * kTileColumns; }

  static constexpr int kGroupTiles = GROUP * kColumnTiles;
  __device__ int first() const { return number / kGroupTiles * GROUP; }
  __device__ int within() const { return number % kGroupTiles; }
  __device__ int height() const { return row_tiles - first() < GROUP ? row_tiles - first() : GROUP; }
};

struct Maps {
  TensorMap *x, *weight;
};

// The column of a tile, or row of the weight, that lies in a panel's row. Lane t of four then has the
// sums of 16 neighbouring columns (see multiply_shared), and stores 16 bytes of out at once.
__device__ inline int column_of(int panel_row) {
  return panel_row / 64 * 64 + panel_row / 2 % 4 * 16 + panel_row / 8 % 8 * 2 + panel_row % 2;
}

// Row 64 a + 16 t + 2 j + i of the weight is at (i, t, j, a) of its map, and copied in that order, i
// fastest: column_of.
__device__ inline Maps make_maps(Shared& shared, TensorMap* maps, const E4m3* x, const E4m3* weight,
                                 unsigned num_rows) {
  const Maps made = {maps + 2 * blockIdx.x, maps + 2 * blockIdx.x + 1};
  make_map<2>(made.x, shared.maps[0], {x, {K, num_rows}, {0, X_STRIDE}, {kDepth, kTileRows}});
  make_map<5>(made.weight, shared.maps[1],
              {weight,
               {K, 2, 4, 8, 2 * I / 64},
               {0, K, 16 * K, 2 * K, 64 * K},
               {kDepth, 2, 4, 8, kTileColumns / 64}});
  return made;
}

__device__ inline void produce(Shared& shared, const Maps& maps, int num_rows, int rank) {
  Turn<STAGES> turn;
  for (Tiles tiles(num_rows); tiles.inside(); tiles.advance()) {
    const int row = tiles.row() + rank * kTileRows;
    const int weight_row = tiles.column() + rank * I;
    for (int step = 0; step < kSteps; ++step, turn.advance()) {
      const unsigned full = shared_address(&shared.full[turn.stage]);
      wait_at(shared_address(&shared.empty[turn.stage]), turn.parity ^ 1);
      arrive_and_expect(full, kStepBytes);
      copy_tile(shared_address(shared.x[turn.stage]), maps.x, full, step * kDepth, row);
      copy_tile_to_blocks(shared_address(shared.weight[turn.stage][rank]), maps.weight, full,
                          step * kDepth, weight_row / 64, 0b11);
    }
  }
}

// This warp is through with a stage: one of its barrier's eight arrivals from each block.
__device__ inline void release(unsigned long long& empty) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < CLUSTER) release_in_block(address_in_block(shared_address(&empty), lane));
}

// One step's share of the sums.
__device__ inline void multiply_step(float (&sums)[kSums], const Shared& shared, int stage, int group,
                                     bool add) {
  const auto x = operand_in_panels(shared_address(shared.x[stage]) + group * 64 * kDepth, 0);
  const auto weight = operand_in_panels(shared_address(shared.weight[stage]), 0);
  begin_products();
#pragma unroll
  for (int part = 0; part < kDepth / 32; ++part) {
    multiply_shared<E4m3, 2 * kTileColumns>(sums, further(x, 32 * part),
                                            further(weight, 32 * part), add || part > 0);
  }
  commit_products();
}

#if BY_ROWS
using Out = Bf16;
#else
using Out = E4m3;
#endif

// Four neighbouring columns of out, as they are stored.
struct Four {
  unsigned words[sizeof(Out)];

  __device__ inline Four(float a, float b, float c, float d) {
#if BY_ROWS
    words[0] = pack_bf16(a, b);
    words[1] = pack_bf16(c, d);
#else
    words[0] = pack_e4m3(a, b, c, d);
#endif
  }
};

struct Output {
  Out* out;
  int num_rows;
  const float *weight_scale, *row_scale;
  Gated unit;

  // Of a row of x.
  __device__ float scale_of(int row) const {
#if BY_ROWS
    return row < num_rows ? row_scale[static_cast<long long>(row) * ROW_SCALE_STRIDE] : 0.f;
#else
    return 1.f;
#endif
  }

  // Half of a tile's columns: this thread's 16 of rows `row` and `row` + 8, from `column` on.
  __device__ void store(const float* gate, const float* up, const Factors* columns, int row,
                        int column, const float (&by)[2]) const {
    constexpr int kWords = sizeof(Out);  // of four columns
    unsigned words[2][4 * kWords];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 a = *reinterpret_cast<const float4*>(columns + 16 * four);
      const float4 b = *reinterpret_cast<const float4*>(columns + 16 * four + 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 8 * four + 2 * i;
        const Four found(Gated::of(by[i] * gate[at], by[i] * up[at], a.x, a.y),
                         Gated::of(by[i] * gate[at + 1], by[i] * up[at + 1], a.z, a.w),
                         Gated::of(by[i] * gate[at + 4], by[i] * up[at + 4], b.x, b.y),
                         Gated::of(by[i] * gate[at + 5], by[i] * up[at + 5], b.z, b.w));
#pragma unroll
        for (int word = 0; word < kWords; ++word) words[i][four * kWords + word] = found.words[word];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 8 * i < num_rows) {
        Out* const to = out + static_cast<long long>(row + 8 * i) * OUT_STRIDE + column;
#pragma unroll
        for (int at = 0; at < 4 * kWords; at += 4) {
          reinterpret_cast<uint4*>(to)[at / 4] =
              uint4{words[i][at], words[i][at + 1], words[i][at + 2], words[i][at + 3]};
        }
      }
    }
  }
};

__device__ inline void consume(Shared& shared, const Output& output, int rank) {
  const int thread = threadIdx.x - kProducers, lane = thread % 32;
  const int group = __shfl_sync(~0u, thread / 128, 0);  // the same for all lanes, and known to be
  const int first_row = rank * kTileRows + thread / 32 * 16 + lane / 4;
  float sums[kSums] = {};
  Turn<STAGES> turn;
  int round = 0;
  for (Tiles tiles(output.num_rows); tiles.inside(); tiles.advance(), ++round) {
    const float* const scales = output.weight_scale + tiles.column() + column_of(thread % 128);
    const float gate_scale = load_early(scales), up_scale = load_early(scales + I);
    int previous = 0;
    for (int step = 0; step < kSteps; ++step, turn.advance()) {
      wait_at(shared_address(&shared.full[turn.stage]), turn.parity);
      multiply_step(sums, shared, turn.stage, group, step > 0);
      if (step > 0) {
        wait_for_products<1>();
        release(shared.empty[previous]);
      }
      previous = turn.stage;
    }
    // Double-buffered: another warp may still be at the tile before, but at none before that.
    Factors* const factors = shared.factors[group][round % 2];
    factors[thread % 128] = output.unit.factors(gate_scale, up_scale);
    wait_for_products<0>();
    settle(sums);
    release(shared.empty[previous]);
    sync_threads(1 + group, kConsumers / 2);
    const int row = tiles.row() + first_row, column = tiles.column() + lane % 4 * 16;
    const float by[2] = {output.scale_of(row), output.scale_of(row + 8)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const gate = sums + kSums / 4 * half;
      output.store(gate, gate + kSums / 2, factors + 64 * half + lane % 4 * 2, row,
                   column + 64 * half, by);
    }
  }
}

}  // namespace trtc

using namespace trtc;

// Grid: (PROGRAMS, 1, 1), as many as fit on a chip. `maps` has room for two a program, and is the first
// of its call's scratch memory, which begins at a multiple of 128 bytes.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(kProducers + kConsumers, 1)
gated_linear(const E4m3* x, const E4m3* weight, const float* weight_scale,
#if BY_ROWS
             const float* row_scale,
#else
             const float* input_scale, const float* out_scale,
#endif
             const int* dims, Out* out, TensorMap* maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int num_rows = dims[COUNT], rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&shared.full[stage]), 1);
      make_barrier(shared_address(&shared.empty[stage]), CLUSTER * kConsumers / 32);
    }
  }
  let_next_kernel_start();
  arrive_at_cluster();
  wait_for_cluster();
  wait_for_earlier_kernels();
  if (threadIdx.x < kProducers) {
    give_registers<40>();
    if (threadIdx.x < 32) {
      const Maps made = make_maps(shared, maps, x, weight, num_rows);
      if (threadIdx.x == 0) produce(shared, made, num_rows, rank);
      __syncwarp();
    }
  } else {
    take_registers<232>();
#if BY_ROWS
    consume(shared, {out, num_rows, weight_scale, row_scale, Gated(1.f, 1.f)}, rank);
#else
    consume(shared, {out, num_rows, weight_scale, nullptr, Gated(*input_scale, *out_scale)}, rank);
#endif
  }
  // The other block arrives at this one's barriers until it is through with its last tile.
  arrive_at_cluster();
  wait_for_cluster();
}
