// out = softcap(x @ ((weight - zero) * weight_scale).T + bias) + residual for bf16 x and 4-bit weights
// in tiles (plugins/tiles.py) or row-major int8 ones, by WGMMA.
//
// An item is a tile, 64 * ROW_GROUPS rows of the weight, and ROWS rows of x; those of the same tile
// follow each other. A cluster of CLUSTER blocks takes an item at a time, and each of its blocks every
// CLUSTER-th chunk of K, 128 channels. In a block
//
//   4 warps     copy chunks into a ring of STAGES: two of them weights, two x
//   TEAMS teams multiply them alternately: ROW_GROUPS groups of four warps, 64 rows of the tile each.
//               Weights become the first operand in registers, x is the second, in shared memory
//
// They synchronise by mbarriers: "full" when a chunk has been copied, "empty" when its team has read it.
// Weights are loaded while the kernels before this one still run (PDL).
//
// Where K is split, a cluster has one item, and its parts of the sums meet in the ring's memory, to
// be added up in the order of blocks and teams: a result depends neither on the other rows of x nor
// on their number.
//
// Macros: N, K; BYTES (int8 weights, else nibbles); CODEBOOK (0, or nibbles are codes and scales bytes, as
// codebook.cuh says), HAS_UNIT (0 or 1: scales are in units of scale_unit); GROUP (channels that share a
// scale: 32, 64, or a multiple of 128), GROUPS; ROWS (of x: 8, 16, 32, 64, 128), ROW_BLOCKS (items of a tile), ROW_GROUPS,
// TEAMS, STAGES, CLUSTER, CLUSTERS; SHARED_BYTES; X_STRIDE, OUT_STRIDE, RESIDUAL_STRIDE; OUT_TYPE,
// RESIDUAL_TYPE; SIGNED, HAS_ZERO, HAS_BIAS, HAS_RESIDUAL (0 or 1); SOFTCAP (0: none); COUNT (which of
// dims counts the rows).
#include "gpu/cluster.cuh"
#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"
#include "gemm/mixed_input_fragments.cuh"

namespace {

using namespace trtc;

constexpr int kGroupRows = 64, kGroupThreads = 128;
constexpr int kCopiers = 64, kProducers = 2 * kCopiers;  // threads: of weights, and of x
constexpr int kTeamThreads = ROW_GROUPS * kGroupThreads;
constexpr int kConsumers = TEAMS * kTeamThreads;
// Whether those who multiply get some of the 96 registers of those who copy.
constexpr bool kHandsOver = kConsumers == 512 && ROWS == 128;
constexpr int kTileRows = ROW_GROUPS * kGroupRows, kTileWarps = kTileRows / kWarpRows;
constexpr int kTiles = (N + kTileRows - 1) / kTileRows;
constexpr int kItems = kTiles * ROW_BLOCKS;
constexpr int kSplits = CLUSTER * TEAMS;
constexpr int kPanelBytes = ROWS * 128;  // 64 channels of x
constexpr int kXBytes = 2 * kPanelBytes;
constexpr int kStageBytes = (kXBytes + kTileWarps * kWarpBytes + 1023) / 1024 * 1024;
constexpr int kSums = ROWS / 2;  // a thread's
constexpr int kPartStride = kTileRows + 4;  // f32 of a row of x; lanes write to different banks
constexpr int kPartFloats = ROWS * kPartStride;
constexpr int kPartBytes = kSplits > 1 ? TEAMS * kPartFloats * 4 : 0;
constexpr int kRingBytes = STAGES * kStageBytes > kPartBytes ? STAGES * kStageBytes : kPartBytes;
static_assert(TEAMS <= STAGES);

struct Shared {
  alignas(1024) u8 ring[kRingBytes];
  unsigned long long full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

__device__ inline int tile_of(int item) { return item / ROW_BLOCKS; }
__device__ inline int first_row_of(int item) { return item % ROW_BLOCKS * ROWS; }

// Which stage a chunk goes through, and the parity of its turn there.
struct Turn {
  int stage = 0;
  unsigned parity = 0;

  __device__ inline void advance(int by) {
    stage += by;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};

// An item and a chunk of it: what a block's stages follow each other with.
struct Place {
  int item, chunk;

  __device__ inline bool is_inside() const { return item < kItems && chunk < kChunks; }
  __device__ inline void advance(int rank) {
    chunk += CLUSTER;
    if (kSplits == 1 && chunk >= kChunks) {
      chunk = rank;
      item += CLUSTERS;
    }
  }
};

// Copies of a tile's weights, scales and zero points, of which this thread takes every kCopiers-th
// piece of 16 bytes.
struct WeightLoader {
  const u8 *weight, *scale, *zero;
  unsigned thread;
  unsigned long long policy;

  __device__ inline void copy(unsigned stage, Place place) const {
    const unsigned to = stage + kXBytes;
    if (BYTES) {
      copy_rows(to, tile_of(place.item) * kTileWarps, place.chunk);
    } else {
      copy_tiles(to, tile_of(place.item) * kTileWarps, place.chunk);
    }
  }

  // Tiles after the last are read as the last, and never stored.
  static __device__ inline long long inside(int tile) {
    constexpr int kLast = N / kWarpRows - 1;
    return N % kTileRows == 0 || tile < kLast ? tile : kLast;
  }

  // 4-bit weights in tiles (plugins/tiles.py).
  __device__ inline void copy_tiles(unsigned to, int first, int chunk) const {
    constexpr unsigned kPieces = kTileBytes / 16, kScales = kParts * kScaleBytes / 16;
#pragma unroll
    for (int i = 0; i < kTileWarps; ++i) {
      const u8* from = weight + (inside(first + i) * kChunks + chunk) * kTileBytes;
      static_assert(kPieces == kCopiers || BYTES);
      const unsigned at = i * kWarpBytes + piece_offset(thread / 4, thread % 4);
      stream_async(to + at, from + thread * 16, 16, policy);
    }
    const int group = chunk / kGroupChunks * kParts;
#pragma unroll
    for (unsigned at = thread; at < kTileWarps * kScales; at += kCopiers) {
      const unsigned tile = at / kScales, piece = at % kScales;
      const u8* from = scale + (inside(first + tile) * GROUPS + group) * kScaleBytes + piece * 16;
      copy_async_16(to + tile * kWarpBytes + kTileBytes + piece * 16, from, 16);
    }
    if (!HAS_ZERO) return;
#pragma unroll
    for (unsigned at = thread; at < kTileWarps * kParts; at += kCopiers) {
      const unsigned tile = at / kParts, part = at % kParts;
      const u8* from = zero + (inside(first + tile) * GROUPS + group + part) * kZeroBytes;
      copy_async_16(to + tile * kWarpBytes + kZerosAt + part * kZeroBytes, from, 16);
    }
  }

  // Row-major int8: eight threads copy 128 channels of a row.
  __device__ inline void copy_rows(unsigned to, int first, int chunk) const {
    const unsigned piece = thread % 8;
#pragma unroll
    for (int i = 0; i < kTileWarps; ++i) {
      const u8* from = weight + inside(first + i) * kWarpRows * K + chunk * kRowBytes + piece * 16;
#pragma unroll
      for (unsigned row = thread / 8; row < kWarpRows; row += kCopiers / 8) {
        stream_async(to + i * kWarpBytes + piece_offset(row, piece), from + row * K, 16, policy);
      }
    }
#pragma unroll
    for (unsigned at = thread; at < kTileRows; at += kCopiers) {
      const unsigned tile = at / kWarpRows, row = at % kWarpRows;
      const long long n = inside(first + tile) * kWarpRows + row;
      copy_async_4(to + tile * kWarpBytes + kTileBytes + row * 4,
                   scale + (n * GROUPS + chunk / kGroupChunks) * 4);
    }
  }
};

// Copies of x into panels, of which this thread takes a piece of every kRowStep-th row.
struct XLoader {
  static constexpr int kRowStep = kCopiers / 16;

  const Bf16* x;
  int rows, thread;

  __device__ inline void copy(unsigned stage, Place place) const {
    const int row = thread / 16, piece = thread % 16, left = rows - first_row_of(place.item);
    const long long first = first_row_of(place.item) + row;
    const Bf16* from = x + first * X_STRIDE + place.chunk * kChunkChannels + piece * 8;
    const unsigned to = stage + piece / 8 * kPanelBytes;
#pragma unroll
    for (int i = 0; i < ROWS; i += kRowStep) {
      if (row + i < left) {
        copy_async_16(to + panel_offset(row + i, piece % 8), from + i * X_STRIDE, 16);
      }
    }
  }
};

__device__ inline unsigned stage_address(const Shared& shared, int stage) {
  return shared_address(shared.ring) + stage * kStageBytes;
}

// Chunk after chunk, each once there is room for it.
template <class Loader>
__device__ inline void produce(Shared& shared, const Loader& loader, Place place, int rank) {
  for (Turn turn; place.is_inside(); place.advance(rank), turn.advance(1)) {
    wait_at(shared_address(&shared.empty[turn.stage]), turn.parity ^ 1);
    loader.copy(stage_address(shared, turn.stage), place);
    arrive_when_copied(shared_address(&shared.full[turn.stage]));
  }
}

// A thread's sums of an item: of rows g and g + 8 of its warp's tile.
struct Products {
  float sums[kSums];
  float units[2];  // what they are multiples of
  unsigned a[2][2][4];  // of two chunks, double-buffered
  int g;
  unsigned selector;

  __device__ inline void begin() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.f;
    units[0] = units[1] = 1.f;
  }

  // `release` is called when the products of earlier chunks are done.
  template <class Release>
  __device__ inline void add_chunk(const u8* tile, unsigned x, Release release) {
    constexpr int kTurns = kChunkChannels / 32, kPartTurns = kTurns / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const RowScale scales[2] = {RowScale(tile, g, part), RowScale(tile, g + 8, part)};
#pragma unroll
      for (int i = 0; i < kPartTurns; ++i) {
        const int turn = part * kPartTurns + i;
        // The products before the last ones had the registers that come now.
        wait_for_products<1>();
        load_fragments(a[turn % 2], shared_address(tile), g, turn, selector, scales);
        if (i == 0) change_units(scales);
        if (turn == 0) release();
        begin_products();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const int channels = 32 * turn + 16 * step;
          const auto panel = operand_in_panels(x + channels / 64 * kPanelBytes, 0);
          multiply_registers_by_rows<Bf16, ROWS>(sums, a[turn % 2][step],
                                                 further(panel, channels % 64 * 2));
        }
        commit_products();
      }
    }
  }

  __device__ inline void change_units(const RowScale (&scales)[2]) {
    const float by[2] = {units[0] * reciprocal_approx(scales[0].rest),
                         units[1] * reciprocal_approx(scales[1].rest)};
    wait_for_products<0>();
    settle(sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= by[i % 4 / 2];
    units[0] = scales[0].rest;
    units[1] = scales[1].rest;
  }

  __device__ inline void end() {
    wait_for_products<0>();
    settle(sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= units[i % 4 / 2];
  }
};

// Chunks of an item that a team multiplies.
struct Consumer {
  Shared& shared;
  Products products;
  Turn turn;
  int warp;  // of the team

  __device__ inline void add_item(int first_chunk) {
    products.begin();
    int previous = -1;
    for (int chunk = first_chunk; chunk < kChunks; chunk += kSplits) {
      wait_at(shared_address(&shared.full[turn.stage]), turn.parity);
      publish_to_products();
      const u8* tile = shared.ring + turn.stage * kStageBytes + kXBytes + warp * kWarpBytes;
      products.add_chunk(tile, stage_address(shared, turn.stage), [&] { release(previous); });
      previous = turn.stage;
      turn.advance(TEAMS);
    }
    products.end();
    release(previous);
  }

  __device__ inline void release(int stage) {
    __syncwarp();
    if (stage >= 0 && threadIdx.x % 32 == 0) arrive(shared_address(&shared.empty[stage]));
  }
};

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(Bf16 x) { return to_float(x); }

struct Output {
  const float* scale_unit;
  const float* bias;
  const RESIDUAL_TYPE* residual;
  OUT_TYPE* out;

  __device__ inline float more(int row, int n) const {
    if (!HAS_RESIDUAL) return 0.f;
    return value_of(residual[static_cast<long long>(row) * RESIDUAL_STRIDE + n]);
  }
  __device__ inline void store(int row, int n, float total, float more) const {
    if (HAS_UNIT) total *= scale_unit[n];
    if (HAS_BIAS) total += bias[n];
    const float softcap = SOFTCAP;
    if (softcap != 0) total = softcap * tanhf(total / softcap);
    out[static_cast<long long>(row) * OUT_STRIDE + n] = round_to<OUT_TYPE>(total + more);
  }
};

// Which rows of x and of a tile a thread's sums are of; recomputed where it is needed, to save
// registers.
struct Where {
  unsigned thread;

  __device__ inline Where() : thread(threadIdx.x) {
    forget(thread);
    thread -= kProducers;
  }
  __device__ inline int row(int i) const { return i / 4 * 8 + thread % 4 * 2 + i % 2; }
  __device__ inline int column(int i) const {
    return thread % kTeamThreads / 32 * kWarpRows + thread % 32 / 4 + i % 4 / 2 * 8;
  }
};

#if CLUSTER * TEAMS == 1
__device__ inline void store_item(const Output& output, const float (&sums)[kSums], int item,
                                  int rows) {
  const Where where;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int row = first_row_of(item) + where.row(i);
    const int n = tile_of(item) * kTileRows + where.column(i);
    if (row < rows && (N % kTileRows == 0 || n < N)) {
      output.store(row, n, sums[i], output.more(row, n));
    }
  }
}
#else
__device__ inline float4 load_part(const float* part, int rank) {
#if CLUSTER > 1
  return load_four_from_block(address_in_block(shared_address(part), rank));
#else
  return *reinterpret_cast<const float4*>(part);
#endif
}

// A sum of four neighbouring columns, of all teams of all blocks in their order.
__device__ inline float4 add_parts(const float* place) {
  float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) {
      const float4 part = load_part(place + team * kPartFloats, rank);
      total.x += part.x;
      total.y += part.y;
      total.z += part.z;
      total.w += part.w;
    }
  }
  return total;
}

// What a consumer stores of its cluster's item: runs of four columns.
struct Share {
  static constexpr int kFours = kTileRows / 4, kCount = ROWS * kFours;
  static constexpr int kStep = CLUSTER * kConsumers, kMost = (kCount + kStep - 1) / kStep;

  int first_row, rows, first_n, mine;
  float more[HAS_RESIDUAL ? kMost : 1][4];

  __device__ inline bool has(int index) const {
    return index < kCount && first_row + index / kFours < rows &&
           (N % kTileRows == 0 || first_n + index % kFours * 4 < N);
  }
  __device__ inline void load_more(const Output& output) {
    if (!HAS_RESIDUAL) return;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int index = mine + i * kStep;
      if (!has(index)) continue;
      const int row = first_row + index / kFours, n = first_n + index % kFours * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) more[i][j] = output.more(row, n + j);
    }
  }
  __device__ inline void store(const Output& output, const float* parts) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int index = mine + i * kStep;
      if (!has(index)) continue;
      const int row = index / kFours, column = index % kFours * 4;
      const float4 four = add_parts(parts + row * kPartStride + column);
      const float totals[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float added = HAS_RESIDUAL ? more[i][j] : 0.f;
        output.store(first_row + row, first_n + column + j, totals[j], added);
      }
    }
  }
};

#endif

// All of the cluster are here, producers too.
__device__ inline void meet_cluster() {
#if CLUSTER > 1
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

__device__ inline void consume(Shared& shared, const Output& output, int first_item, int rows,
                               int rank) {
  const int thread = static_cast<int>(threadIdx.x) - kProducers, lane = thread % 32;
  // The same for all lanes, and known to be.
  const int team = TEAMS == 1 ? 0 : __shfl_sync(~0u, thread / kTeamThreads, 0);
  Consumer consumer{shared, {}, {team}, thread % kTeamThreads / 32};
  Products& products = consumer.products;
  products.g = lane / 4;
  products.selector = selector_of(lane % 4);
#if CLUSTER * TEAMS == 1
  for (int item = first_item; item < kItems; item += CLUSTERS) {
    consumer.add_item(0);
    store_item(output, products.sums, item, rows);
  }
#else
  consumer.add_item(team * CLUSTER + rank);
  // All have read their stages for the last time: their memory takes the parts of the sums.
  float* const parts = reinterpret_cast<float*>(shared.ring);
  sync_threads(1, kConsumers);
  const Where where;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    parts[team * kPartFloats + where.row(i) * kPartStride + where.column(i)] = products.sums[i];
  }
  Share share{first_row_of(first_item), rows, tile_of(first_item) * kTileRows,
              rank * kConsumers + static_cast<int>(where.thread)};
  share.load_more(output);
  if (CLUSTER == 1) sync_threads(1, kConsumers);
  meet_cluster();
  share.store(output, parts);
#endif
}

}  // namespace

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(kProducers + kConsumers, 1) mixed_input_gemm(
    const Bf16* __restrict__ x, const u8* __restrict__ weight, const u8* __restrict__ weight_scale,
#if HAS_ZERO
    const u8* __restrict__ weight_zero,
#endif
#if HAS_UNIT
    const float* __restrict__ scale_unit,
#endif
#if HAS_BIAS
    const float* __restrict__ bias,
#endif
#if HAS_RESIDUAL
    const RESIDUAL_TYPE* residual,
#endif
    const int* __restrict__ dims, OUT_TYPE* out) {
#if !HAS_ZERO
  const u8* weight_zero = nullptr;
#endif
#if !HAS_UNIT
  const float* scale_unit = nullptr;
#endif
#if !HAS_BIAS
  const float* bias = nullptr;
#endif
#if !HAS_RESIDUAL
  const RESIDUAL_TYPE* residual = nullptr;
#endif
  extern __shared__ __align__(1024) u8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
#if CLUSTER > 1
  const int rank = rank_in_cluster();
#else
  const int rank = 0;
#endif
  const int first_item = static_cast<int>(blockIdx.x) / CLUSTER, thread = threadIdx.x;
  const int rows = dims[COUNT];
  if (thread == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&shared.full[stage]), kProducers);
      make_barrier(shared_address(&shared.empty[stage]), kTeamThreads / 32);
    }
  }
  let_next_kernel_start();
  __syncthreads();
  if (thread < kProducers) {
    if (kHandsOver) give_registers<56>();
    if (thread < kCopiers) {
      const WeightLoader loader{weight, weight_scale, weight_zero, static_cast<unsigned>(thread),
                                evict_first()};
      produce(shared, loader, {first_item, rank}, rank);
    } else {
      wait_for_earlier_kernels();
      produce(shared, XLoader{x, rows, thread - kCopiers}, {first_item, rank}, rank);
    }
    meet_cluster();  // Its parts are there: see `consume`.
  } else {
    if (kHandsOver) take_registers<104>();
    wait_for_earlier_kernels();
    consume(shared, {scale_unit, bias, residual, out}, first_item, rows, rank);
  }
  meet_cluster();  // The others may still read this block's parts.
}
