// out = softcap(x @ weight.T * weight_scale * input_scale + bias) + residual, or with row_scale, one
// number for each row of x, in place of input_scale, for so few rows that reading the weights is the bound.
//
// The other cost is the ramp from one kernel to the next. So a block starts while the kernels
// before it still run (PDL) and fills its shared memory with weights, which no kernel writes; only
// then it waits for x.
//
// The weight is cut into tiles of 64 * ROW_GROUPS rows, and K into segments of 128 bytes. A cluster
// of CLUSTER blocks takes a tile at a time, and segment s of K is multiplied by
//
//     team s % TEAMS of its block's TEAMS teams, block s / TEAMS % CLUSTER of the cluster
//
// A team is ROW_GROUPS groups of four warps, which take 64 rows of a tile each and share a ring of
// STAGES segments. Team 0 adds up the teams' sums in their order, and the first block's team 0 the
// blocks', so a result depends neither on the other rows of x nor on their number.
//
// Macros: N, K; E4M3 (weights and x, else bf16); ROWS (of x at most: 8, 16, 32, 64, 128),
// ROW_GROUPS, TEAMS, STAGES, CLUSTER, CLUSTERS; LEAD (the next kernel may start when a team has so
// many segments left to load); HAS_WGMMA (of sm_90, else those of a warp); X_STRIDE,
// OUT_STRIDE, RESIDUAL_STRIDE; OUT_F32, RESIDUAL_F32, HAS_WEIGHT_SCALE, HAS_INPUT_SCALE, HAS_BIAS,
// HAS_RESIDUAL, HAS_ROW_SCALE (0 or 1); ROW_SCALE_STRIDE; SOFTCAP (0: none); COUNT (which of dims
// counts the rows); GATED (1: out is what gemm/skinny_gated.cuh says, with nothing added to sums and
// no row_scale).
#include "gpu/cluster.cuh"
#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"
#include "gemm/tile_product.cuh"
#if GATED
#include "gemm/skinny_gated.cuh"
#endif

namespace {

using namespace trtc;

#if E4M3
using Element = E4m3;
#else
using Element = Bf16;
#endif
constexpr int kGroupThreads = 128, kGroupRows = 64;
constexpr int kTeamThreads = ROW_GROUPS * kGroupThreads;
constexpr int kThreads = TEAMS * kTeamThreads;
constexpr int kTileRows = ROW_GROUPS * kGroupRows;
constexpr int kTiles = (N + kTileRows - 1) / kTileRows;
constexpr long long kDepthBytes = static_cast<long long>(K) * sizeof(Element);
constexpr int kSegments = (kDepthBytes + kTileRowBytes - 1) / kTileRowBytes;
constexpr int kSplits = CLUSTER * TEAMS;
constexpr int kRowChunks = kTileRowBytes / kChunkBytes;
constexpr int kXRowBytes = X_STRIDE * sizeof(Element);
constexpr int kWeightBytes = kTileRows * kTileRowBytes;
constexpr int kStageBytes = kWeightBytes + ROWS * kTileRowBytes;
constexpr int kRingBytes = TEAMS * STAGES * kStageBytes;
constexpr int kSums = ROWS / 2;  // a thread's
constexpr int kPartBytes = kSums * kTeamThreads * 4;
// Hardware barriers: from 1, one a team; and two between the teams.
constexpr int kPartsWritten = TEAMS + 1, kPartsRead = TEAMS + 2;

// The row of the weight that is row n of the tiles. Those after the last are read as the last, and
// never stored.
__device__ inline int weight_row(int n) {
  const int row = N % kTileRows == 0 || n < N ? n : N - 1;
#if GATED
  return gated_row(row);
#else
  return row;
#endif
}

// A tile and a segment of it: a team's stages follow each other in this order.
struct Place {
  int tile, segment;

  __device__ inline void advance(int split) {
    segment += kSplits;
    if (segment >= kSegments) {
      segment = split;
      tile += CLUSTERS;
    }
  }
  __device__ inline bool inside() const { return tile < kTiles && segment < kSegments; }
};

// Copies of a team, of which this thread takes one chunk of every kRowStep-th row.
struct Loader {
  static constexpr int kRowStep = kTeamThreads * kChunkBytes / kTileRowBytes;

  const unsigned char *weight, *x;
  int row, chunk;
  unsigned long long policy;

  __device__ inline void copy_weights(unsigned stage, Place place) const {
    if (!place.inside()) return;
    const int byte = byte_of(place), bytes = present(byte);
    const unsigned char* from = weight + (bytes ? byte : 0);
#pragma unroll
    for (int at = row; at < kTileRows; at += kRowStep) {
      const long long offset = weight_row(place.tile * kTileRows + at) * kDepthBytes;
      stream_async(stage + panel_offset(at, chunk), from + offset, bytes, policy);
    }
  }

  __device__ inline void copy_x(unsigned stage, Place place, int rows) const {
    if (!place.inside()) return;
    const int byte = byte_of(place), bytes = present(byte);
    const unsigned char* from = x + (bytes ? byte : 0);
#pragma unroll
    for (int i = 0; i < (ROWS + kRowStep - 1) / kRowStep; ++i) {
      const int at = row + i * kRowStep;
      if (at < rows) {
        const long long offset = static_cast<long long>(at) * kXRowBytes;
        copy_async_16(stage + kWeightBytes + panel_offset(at, chunk), from + offset, bytes);
      }
    }
  }

  __device__ inline int byte_of(Place place) const {
    return place.segment * kTileRowBytes + chunk * kChunkBytes;
  }
  // Bytes that a chunk has of a row; the last segment's last chunks may be zeros.
  static __device__ inline int present(int byte) {
    return kDepthBytes % kTileRowBytes == 0 || byte < kDepthBytes ? kChunkBytes : 0;
  }
};

// The segments of a team on their way through shared memory.
struct Ring {
  Loader loader;
  unsigned stages;  // address of the first
  int split, rows = 0;
  Place next;
  int unasked;  // segments that are not on their way yet
  int stage = 0;
  bool full = true;

  // Weights of the first segments; x must wait for other kernels.
  __device__ inline void ask_for_weights() {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      loader.copy_weights(stages + i * kStageBytes, next);
      next.advance(split);
    }
  }
  __device__ inline void ask_for_x(int first_tile) {
    Place place{first_tile, split};
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      loader.copy_x(stages + i * kStageBytes, place, rows);
      commit_copies();
      place.advance(split);
    }
  }

  // The address of the next segment. All of the team have multiplied the one before it then, and
  // the load of another one is issued into its place.
  __device__ inline unsigned take(int team) {
    wait_for_copies<STAGES - 2>();
    show_tiles();
    sync_threads(1 + team, kTeamThreads);
    if (!full) {
      const unsigned free = stages + (stage == 0 ? STAGES - 1 : stage - 1) * kStageBytes;
      loader.copy_weights(free, next);
      loader.copy_x(free, next, rows);
      commit_copies();
      next.advance(split);
      --unasked;
    }
    full = false;
    const unsigned at = stages + stage * kStageBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    return at;
  }
};

// Sums i ... i + 3 of this thread; a part has those of a team, one thread's after another's.
__device__ inline float4* sums_in(unsigned char* part, int i) {
  return reinterpret_cast<float4*>(part) + i / 4 * kTeamThreads + threadIdx.x % kTeamThreads;
}
__device__ inline float4 four(const float (&sums)[kSums], int i) {
  return {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
}
__device__ inline void add_part(float (&sums)[kSums], unsigned char* part) {
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    const float4 more = *sums_in(part, i);
    sums[i] += more.x;
    sums[i + 1] += more.y;
    sums[i + 2] += more.z;
    sums[i + 3] += more.w;
  }
}

// Sums of teams 1 ... on their way to team 0. Team 0 alone waits for a tile's end.
struct Teams {
  unsigned char* parts;

  __device__ inline void give(const float (&sums)[kSums], int team, bool first) const {
    if (!first) sync_threads(kPartsRead, kThreads);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) *sums_in(parts + (team - 1) * kPartBytes, i) = four(sums, i);
    arrive_at_threads(kPartsWritten, kThreads);
  }
  __device__ inline void collect(float (&sums)[kSums], bool last) const {
    sync_threads(kPartsWritten, kThreads);
#pragma unroll
    for (int from = 0; from < TEAMS - 1; ++from) add_part(sums, parts + from * kPartBytes);
    if (!last) arrive_at_threads(kPartsRead, kThreads);
  }
};

#if CLUSTER > 1
// The same between the team 0 of each block, through the memory of the first block.
struct Blocks {
  unsigned char* parts;
  unsigned written, read;  // barriers: in the first block, and in each of the others
  unsigned phase = 0;

  __device__ inline explicit Blocks(unsigned char* memory)
      : parts(memory),
        written(shared_address(memory + (CLUSTER - 1) * kPartBytes)),
        read(written + 8) {
    if (threadIdx.x == 0) {
      make_barrier(written, (CLUSTER - 1) * kTeamThreads);
      make_barrier(read, kTeamThreads);
    }
    __syncwarp();
    arrive_at_cluster();
  }

  __device__ inline void give(const float (&sums)[kSums], int rank, bool first) {
    if (!first) {
      wait_for_blocks(read, phase);
      phase ^= 1;
    }
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const unsigned to = shared_address(sums_in(parts + (rank - 1) * kPartBytes, i));
      store_in_block(address_in_block(to, 0), four(sums, i));
    }
    arrive_in_block(address_in_block(written, 0));
  }
  __device__ inline void collect(float (&sums)[kSums], bool last) {
    wait_for_blocks(written, phase);
    phase ^= 1;
#pragma unroll
    for (int from = 0; from < CLUSTER - 1; ++from) add_part(sums, parts + from * kPartBytes);
    if (last) return;
#pragma unroll
    for (int to = 1; to < CLUSTER; ++to) arrive_in_block(address_in_block(read, to));
  }
};
#endif

// The two rows of a weight's tile whose sums a thread holds, and what belongs to them.
struct Columns {
  float scale[2], offset[2];

  static __device__ inline int column(int tile, int i) {
    const int thread = static_cast<int>(threadIdx.x) % kTeamThreads;
    return tile * kTileRows + thread / 32 * 16 + thread % 32 / 4 + i * 8;
  }

  // Long before they are needed, so that the last tile's end waits for nothing.
  __device__ inline void load(int tile, const float* weight_scale, const float* bias) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = weight_row(column(tile, i));
      if (HAS_WEIGHT_SCALE) scale[i] = load_early(weight_scale + at);
      if (HAS_BIAS) offset[i] = load_early(bias + at);
    }
  }
};

// The row of x that a thread's i-th sum is of.
__device__ inline int row_of(int i) {
  return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
}
__device__ inline bool is_inside(int row, int rows, int column) {
  return row < rows && (N % kTileRows == 0 || column < N);
}

// What is added to a thread's sums of a tile.
struct Residual {
  float value[HAS_RESIDUAL ? kSums : 1];

  // Before the tile's products, so that its end waits for nothing.
  __device__ inline void load(const void* residual, int tile, int rows) {
    if (!HAS_RESIDUAL) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int column = Columns::column(tile, i % 4 / 2);
      if (!is_inside(row_of(i), rows, column)) continue;
      const long long from = static_cast<long long>(row_of(i)) * RESIDUAL_STRIDE + column;
      value[i] = RESIDUAL_F32 ? static_cast<const float*>(residual)[from]
                              : to_float(static_cast<const Bf16*>(residual)[from]);
    }
  }
};

// What a thread's sums of its rows are multiplied with. Where there are registers for all, they are
// loaded before the products, so that a tile's end waits for nothing; else for some sums at a time.
struct RowScales {
  static constexpr bool kEarly = ROWS <= 32;
  static constexpr int kAtOnce = kEarly || !HAS_ROW_SCALE ? kSums : 16;  // sums
  float value[HAS_ROW_SCALE ? kAtOnce / 2 : 1];

  __device__ inline void load(const float* row_scale, int first, int rows) {
    if (!HAS_ROW_SCALE) return;
#pragma unroll
    for (int i = 0; i < kAtOnce / 2; ++i) {
      const int row = row_of(first + i / 2 * 4 + i % 2);
      value[i] = row < rows ? row_scale[row * ROW_SCALE_STRIDE] : 0;
    }
  }
  // Of the i-th sum.
  __device__ inline float of(int i) const {
    return value[HAS_ROW_SCALE ? i % kAtOnce / 4 * 2 + i % 2 : 0];
  }
};

struct Output {
  float by_input;
  const float* row_scale;
  float out_scale;
  void* out;

#if GATED
  __device__ inline void store_tile(const float (&sums)[kSums], const Columns& columns,
                                    const Residual&, RowScales&, int tile, int rows) const {
    const int first = Columns::column(tile, 0);
    auto* const to = static_cast<Gated*>(out) + gated_column(first);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (i % 4 >= 2 || !is_inside(row_of(i), rows, first)) continue;
      to[static_cast<long long>(row_of(i)) * OUT_STRIDE] =
          gated(scaled(sums[i], columns, 0), scaled(sums[i + 2], columns, 1), out_scale);
    }
  }
#else
  __device__ inline void store_tile(const float (&sums)[kSums], const Columns& columns,
                                    const Residual& residual, RowScales& scales, int tile,
                                    int rows) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (!RowScales::kEarly && i % RowScales::kAtOnce == 0) scales.load(row_scale, i, rows);
      const int which = i % 4 / 2;
      const int column = Columns::column(tile, which);
      if (is_inside(row_of(i), rows, column)) {
        float total = scaled(sums[i], columns, which);
        if (HAS_ROW_SCALE) total *= scales.of(i);
        if (HAS_BIAS) total += columns.offset[which];
        const float softcap = SOFTCAP;
        if (softcap != 0) total = softcap * tanhf(total / softcap);
        if (HAS_RESIDUAL) total += residual.value[i];
        store(row_of(i), column, total);
      }
    }
  }

  __device__ inline void store(int row, int column, float total) const {
    const long long to = static_cast<long long>(row) * OUT_STRIDE + column;
    if (OUT_F32) {
      static_cast<float*>(out)[to] = total;
    } else {
      static_cast<Bf16*>(out)[to] = round_to<Bf16>(total);
    }
  }
#endif

  // By the static scales.
  __device__ inline float scaled(float sum, const Columns& columns, int which) const {
    if (HAS_WEIGHT_SCALE) sum *= columns.scale[which];
    if (HAS_INPUT_SCALE) sum *= by_input;
    return sum;
  }
};

}  // namespace

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(kThreads, 1) skinny_linear(
    const unsigned char* __restrict__ x, const unsigned char* __restrict__ weight,
#if HAS_WEIGHT_SCALE
    const float* __restrict__ weight_scale,
#endif
#if HAS_INPUT_SCALE
    const float* __restrict__ input_scale,
#endif
#if HAS_BIAS
    const float* __restrict__ bias,
#endif
#if HAS_RESIDUAL
    const void* residual,
#endif
#if HAS_ROW_SCALE
    const float* row_scale,
#endif
#if HAS_OUT_SCALE
    const float* __restrict__ out_scale,
#endif
    const int* dims, void* out) {
#if !HAS_WEIGHT_SCALE
  const float* weight_scale = nullptr;
#endif
#if !HAS_BIAS
  const float* bias = nullptr;
#endif
#if !HAS_RESIDUAL
  const void* residual = nullptr;
#endif
#if !HAS_ROW_SCALE
  const float* row_scale = nullptr;
#endif
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Teams teams{shared_bytes + kRingBytes};
#if CLUSTER > 1
  Blocks blocks(teams.parts + (TEAMS - 1) * kPartBytes);
  const int rank = rank_in_cluster();
#else
  const int rank = 0;
#endif
  // The same for all lanes, and known to be.
  const int team = __shfl_sync(~0u, threadIdx.x / kTeamThreads, 0);
  const int group = __shfl_sync(~0u, threadIdx.x % kTeamThreads / kGroupThreads, 0);
  const int thread = static_cast<int>(threadIdx.x) % kTeamThreads;
  const int split = rank * TEAMS + team;
  const int first_tile = static_cast<int>(blockIdx.x) / CLUSTER;
  const int num_tiles = (kTiles - first_tile + CLUSTERS - 1) / CLUSTERS;
  const int num_segments = (kSegments - split + kSplits - 1) / kSplits;

  Ring ring{{weight, x, thread / kRowChunks, thread % kRowChunks, evict_first()},
            shared_address(shared_bytes) + team * STAGES * kStageBytes,
            split,
            dims[COUNT] < ROWS ? dims[COUNT] : ROWS,
            {first_tile, split},
            num_tiles * num_segments - STAGES};
  if (ring.unasked <= LEAD) let_next_kernel_start();
  ring.ask_for_weights();
  Columns columns{};
  if (split == 0) columns.load(first_tile, weight_scale, bias);
  Output output{1, row_scale, 1, out};
#if HAS_INPUT_SCALE
  output.by_input = load_early(input_scale);
#endif
#if HAS_OUT_SCALE
  output.out_scale = load_early(out_scale);
#endif
  wait_for_earlier_kernels();
  ring.ask_for_x(first_tile);
  Residual more;
  if (split == 0) more.load(residual, first_tile, ring.rows);
  RowScales scales;
  if (split == 0 && RowScales::kEarly) scales.load(row_scale, 0, ring.rows);
#if CLUSTER > 1
  wait_for_cluster();
#endif

  for (int tile = first_tile; tile < kTiles; tile += CLUSTERS) {
    float sums[kSums] = {};
    for (int segment = split; segment < kSegments; segment += kSplits) {
      const unsigned at = ring.take(team);
      if (ring.unasked == LEAD) let_next_kernel_start();
      const unsigned weights = at + group * kGroupRows * kTileRowBytes;
      multiply_tiles<Element, ROWS>(sums, weights, at + kWeightBytes);
    }
    const bool first = tile == first_tile, last = tile + CLUSTERS >= kTiles;
    if (team != 0) {
      teams.give(sums, team, first);
      continue;
    }
    teams.collect(sums, last);
#if CLUSTER > 1
    if (rank != 0) {
      blocks.give(sums, rank, first);
      continue;
    }
    blocks.collect(sums, last);
#endif
    output.store_tile(sums, columns, more, scales, tile, ring.rows);
    if (!last) {
      columns.load(tile + CLUSTERS, weight_scale, bias);
      more.load(residual, tile + CLUSTERS, ring.rows);
    }
  }
  wait_last();
}
