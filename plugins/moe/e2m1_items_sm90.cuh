// How products of experts with E2M1 weights fall into items on sm_90, and where an item's results go
// (e2m1_tiles_sm90.cu, e2m1_wide_sm90.cu): the pairs of an expert into blocks of up to BLOCK_ROWS, its weight into
// tiles of TEAMS * 64 rows. A warp has 16 rows of a tile; where GATED they are eight of gate and the same of up.
//
// Macros: N (rows of an expert's weight), K, COLUMNS (of the output), NUM_EXPERTS, CAPACITY (of members); BLOCK_ROWS,
// TEAMS, PRODUCER_REGISTERS, CONSUMER_REGISTERS; HAS_BIAS (0 or 1); GATED.
#pragma once

#include "moe/e2m1_sm90.cuh"

namespace trtc {

constexpr int kTeamThreads = 128, kConsumers = TEAMS * kTeamThreads, kProducers = 128;
// Threads begin with as many registers each as all of them can have. More than those would never be given.
constexpr int kThreads = kConsumers + kProducers, kRegisters = 65536 / kThreads / 8 * 8 * kThreads;
static_assert(kConsumers * CONSUMER_REGISTERS + kProducers * PRODUCER_REGISTERS <= kRegisters);
constexpr int kWarpRows = 16, kTileRows = TEAMS * 64;
constexpr int kWarpColumns = GATED ? kWarpRows / 2 : kWarpRows;
constexpr int kTileColumns = GATED ? kTileRows / 2 : kTileRows;
constexpr int kTiles = (COLUMNS + kTileColumns - 1) / kTileColumns;
constexpr int kMapRows = GATED ? 8 : 16;  // of the weight, from one to the next of the map's last dimension
static_assert(COLUMNS % kMapRows == 0 && N == (GATED ? 2 : 1) * COLUMNS);

constexpr int kGroups = K / kGroup;
constexpr int kScaleStride = scale_stride(kGroups);
constexpr int kChunks = (kGroups + kChunkGroups - 1) / kChunkGroups;
constexpr int kWarpBytes = kWarpRows * kChunkBytes, kTileBytes = kTileRows * kChunkBytes;  // of a chunk
constexpr int kLaneRows = (BLOCK_ROWS + 31) / 32;

using Blocks = BlockList<BLOCK_ROWS, NUM_EXPERTS>;

struct Item {
  int block, tile;
  Block pairs;

  // By a whole warp.
  __device__ inline Item(const Blocks& blocks, const int* counts, int number)
      : block(number / kTiles), tile(number % kTiles), pairs(blocks.find(counts, block)) {}

  // Of the weight's map.
  __device__ inline int map_row() const { return (pairs.expert * N + tile * kTileColumns) / kMapRows; }
};

// The scales of a thread's two rows of the weight, a chunk at a time.
struct RowScales {
  const u8* scale;
  unsigned rows[2];

  __device__ inline RowScales(const u8* scale, const Item& item, int column) : scale(scale) {
    const int last = COLUMNS - 1, first = item.pairs.expert * N;
    const int other = GATED ? min(column, last) + COLUMNS : min(column + 8, last);
    rows[0] = static_cast<unsigned>(first + min(column, last)) * kScaleStride;
    rows[1] = static_cast<unsigned>(first + other) * kScaleStride;
  }

  __device__ inline void load(uint2 (&scales)[2], int chunk) const {
    const int at = chunk * kChunkGroups;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* const words = reinterpret_cast<const unsigned*>(scale + (rows[i] + at));
      scales[i].x = words[0];
      scales[i].y = at + 4 < kScaleStride ? words[1] : 0;
    }
  }
};

// Where an item's sums go.
struct Destination {
  const float* bias;
  const int* members;
#if GATED
  Bf16* out;
#else
  float* out;
#endif
  int column = 0, found = 0;
  float offset[2] = {0.f, 0.f};
  int pairs[kLaneRows] = {};  // of rows lane, lane + 32, ...

  // Before the sums are there.
  __device__ inline void begin(const Item& item, int column_of_thread) {
    column = column_of_thread;
    found = item.pairs.found;
#if HAS_BIAS
    const float* const bias_at = bias + static_cast<long long>(item.pairs.expert) * N;
    offset[0] = bias_at[min(column, N - 1)];
    offset[1] = bias_at[min(column + (GATED ? COLUMNS : 8), N - 1)];
#endif
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      pairs[i] = members[item.pairs.expert * CAPACITY + item.pairs.first + lane_row(i)];
    }
  }

  // Of a lane the i-th row of the block, or its last.
  __device__ inline int lane_row(int i) const {
    return min(static_cast<int>(threadIdx.x) % 32 + 32 * i, found - 1);
  }
};

}  // namespace trtc
