// The producers of prefill_sm90.cu, which copy Q, K and V to shared memory by TMA.
//
// It copies a panel of a page at a time: threads that copied 16 bytes each took a sixth of the time from
// the products. A pool of E4M3 is copied as it is, and widened to f16 by the warps that had it copied.
#pragma once

#include "paged_attention/prefill_sm90.cuh"

namespace trtc {

constexpr int kPageRows = smaller(PAGE_SIZE, BLOCK_N);  // of a page, that a block has
constexpr int kPages = BLOCK_N / kPageRows;             // of a block
static_assert(BLOCK_N % kPageRows == 0 && PAGE_SIZE % kPageRows == 0);
static_assert(kPages * kPoolPanels <= 32, "every panel of a page has a lane that has it copied");

// Where a chunk of operands goes, in panels of kPanelRows rows.
template <int kPanelRows>
__device__ inline unsigned place(int row, int chunk) {
  return chunk / 8 * (kPanelRows * 128) + panel_offset(row, chunk % 8);
}

// Q [tokens, heads, bytes], and the pool [2 * pages, KV heads, rows of a page, bytes]: by the rows of a
// page that a block has, and row by row.
struct Maps {
  const TensorMap *queries, *pages, *rows;
};

// Keys or values of one tile, copied by a warp: each lane sees to one panel of one page of a block.
struct Blocks {
  const int* pages;  // of the tile's sequence
  int first, end;    // keys that some row sees
  int kv_head, which;

  __device__ Blocks(const Tile& tile, const int* page_table, int which)
      : pages(page_table + static_cast<long long>(tile.sequence) * TABLE_WIDTH),
        first(tile.first_key()),
        end(tile.context),
        kv_head(tile.kv_head),
        which(which) {}

  __device__ static int lane_row() { return threadIdx.x % 32 % kPages * kPageRows; }
  __device__ bool is_live(int key) const { return key >= first && key < end; }

  // This lane's page of a block.
  __device__ int page_of(int block) const {
    const int key = block * BLOCK_N + lane_row();
    return key < end ? pages[key / PAGE_SIZE] : 0;
  }

  // Starts a copy and says how much it will be. V's rows that nobody may look at become zeros, since 0
  // times what is there need not be 0; scores of such keys are thrown away. TMA finds zeros
  // beyond a page's rows.
  __device__ void copy(const Maps& maps, int block, int page, unsigned to, unsigned full) const {
    const int lane = threadIdx.x % 32, panel = lane / kPages;
    if (lane == 0) arrive_and_expect(full, kCopiedBytes);
    __syncwarp();
    if (panel >= kPoolPanels) return;
    const int row = lane_row(), key = block * BLOCK_N + row, plane = 2 * page + which;
    const unsigned at = to + (panel * BLOCK_N + row) * 128;
    const auto from = [&](int key, bool live) { return live ? key % PAGE_SIZE : PAGE_SIZE; };
    const bool any = key < end && key + kPageRows > first;
    if (which == 0 || !any || (is_live(key) && is_live(key + kPageRows - 1))) {
      copy_tile(at, maps.pages, full, panel * 128, from(key, any), kv_head, plane);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kPageRows; ++i) {
      copy_tile(at + i * 128, maps.rows, full, panel * 128, from(key + i, is_live(key + i)), kv_head,
                plane);
    }
  }
};

// A team's items, one a thread at once, are loaded kAtOnce at a time: no load may pass a store.
template <int kItems, int kAtOnce, class Address, class Convert>
__device__ inline void convert_items(Address address, Convert convert) {
  static_assert(kItems % kAtOnce == 0);
#pragma unroll 1
  for (int begin = 0; begin < kItems; begin += kAtOnce) {
    uint4 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) words[i] = load_shared(address(begin + i));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) convert(begin + i, words[i]);
  }
}

// Makes operands of a block of E4M3: all of a team.
__device__ inline void widen_block(unsigned from, unsigned to, int thread) {
  constexpr int kRowChunks = kRowBytes / 16, kItems = BLOCK_N * kRowChunks / kTeam;
  // Whole eights of rows on, chunks lie at the same places of their rows.
  constexpr bool kSamePlaces = kTeam % (8 * kRowChunks) == 0;
  constexpr int kStep = kSamePlaces ? kTeam / kRowChunks * 128 : 0;
  const auto chunk_of = [=](int i) {
    return (kSamePlaces ? thread : i * kTeam + thread) % kRowChunks;
  };
  const auto row_of = [=](int i) { return (kSamePlaces ? thread : i * kTeam + thread) / kRowChunks; };
  const auto raw = [=](int i) {
    return from + place<BLOCK_N>(row_of(i), chunk_of(i)) + i * kStep;
  };
  convert_items<kItems, kSamePlaces ? 4 : 2>(raw, [=](int i, uint4 words) {
    // Lanes whose chunks are of neighbouring panels begin with different halves: the same halves would
    // be in the same banks.
    const bool later = chunk_of(i) / 4 % 2;
    const uint2 a = e4m3_to_f16(later ? words.z : words.x), b = e4m3_to_f16(later ? words.w : words.y);
    const uint2 c = e4m3_to_f16(later ? words.x : words.z), d = e4m3_to_f16(later ? words.y : words.w);
    const unsigned at = to + place<BLOCK_N>(row_of(i), 2 * chunk_of(i) + later) + i * kStep;
    store_shared(at, {a.x, a.y, b.x, b.y});
    store_shared(at ^ 16, {c.x, c.y, d.x, d.y});
  });
}

// Makes operands of the queries, in place: all of a team.
__device__ inline void convert_queries(unsigned queries, int thread) {
  const auto at = [=](int i) { return queries + (i * kTeam + thread) * 16; };
  convert_items<kQueryBytes / 16 / kTeam, 2>(at, [=](int i, uint4 pairs) {
    store_shared(at(i), {query_operand(pairs.x), query_operand(pairs.y), query_operand(pairs.z),
                         query_operand(pairs.w)});
  });
}

// Called by all of a team once it has written: arrives at the barrier.
__device__ inline void publish(unsigned full, int which, int thread) {
  publish_to_products();
  sync_threads(2 + which, kTeam);
  if (thread == 0) arrive(full);
}

// Has the tile's queries copied; the first warp of the team of V, or for E4M3 all of it.
__device__ inline void bring_queries(Shared& shared, const Tile& tile, const Maps& maps, int thread,
                                     unsigned parity) {
  const unsigned full = shared_address(&shared.barriers.query_full);
  const unsigned copied = kE4m3 ? shared_address(&shared.query_copied) : full;
  copy_queries(shared, tile, maps.queries, thread, copied, parity);
  if constexpr (kE4m3) {
    wait_at(copied, parity);
    convert_queries(shared_address(shared.queries), thread);
    publish(full, 1, thread);
  }
}

// Has a tile's keys or values copied to where products find them.
__device__ inline void copy_blocks(Shared& shared, const Tile& tile, const Blocks& blocks,
                                   const Maps& maps, Turn& turn) {
  Barriers& barriers = shared.barriers;
  const bool keys = blocks.which == 0;
  int page = blocks.page_of(tile.first_block());
  for (int block = tile.first_block(); block < tile.end_block(); ++block, ++turn.number) {
    const int stage = turn.stage(), next_page = blocks.page_of(block + 1);
    wait_at(shared_address(keys ? &barriers.key_empty[stage] : &barriers.value_empty[stage]),
            turn.earlier());
    blocks.copy(maps, block, page, shared_address(keys ? shared.keys[stage] : shared.values[stage]),
                shared_address(keys ? &barriers.key_full[stage] : &barriers.value_full[stage]));
    page = next_page;
  }
}

// The same by way of a buffer, from where they are widened. A team is through with a part of it before
// the next copy there begins.
__device__ inline void widen_blocks(Shared& shared, const Tile& tile, const Blocks& blocks,
                                    const Maps& maps, Turn& turn, int thread) {
  Barriers& barriers = shared.barriers;
  const bool keys = blocks.which == 0;
  TurnOf<kRawStages> raw{turn.number};
  const auto copy = [&](int block, int page) {
    if (thread < 32 && block < tile.end_block()) {
      const int stage = raw.stage();
      blocks.copy(maps, block, page, shared_address(shared.raw[blocks.which][stage]),
                  shared_address(&shared.raw_full[blocks.which][stage]));
    }
  };
  for (int i = 0; i < kRawStages; ++i, ++raw.number) {
    copy(tile.first_block() + i, blocks.page_of(tile.first_block() + i));
  }
  raw.number = turn.number;
  for (int block = tile.first_block(); block < tile.end_block(); ++block, ++turn.number, ++raw.number) {
    const int stage = turn.stage(), page = blocks.page_of(block + kRawStages);
    wait_at(shared_address(&shared.raw_full[blocks.which][raw.stage()]), raw.parity());
    wait_at(shared_address(keys ? &barriers.key_empty[stage] : &barriers.value_empty[stage]),
            turn.earlier());
    widen_block(shared_address(shared.raw[blocks.which][raw.stage()]),
                shared_address(keys ? shared.keys[stage] : shared.values[stage]), thread);
    publish(shared_address(keys ? &barriers.key_full[stage] : &barriers.value_full[stage]),
            blocks.which, thread);
    copy(block + kRawStages, page);
  }
}

// Has K (warps 0 and 1) or Q and V (warps 2 and 3) of tile after tile copied.
__device__ inline void produce(Shared& shared, const Maps& maps, const int* query_start,
                               const int* context_lens, const int* page_table, int num_sequences,
                               int* counter) {
  const int which = threadIdx.x / kTeam, thread = threadIdx.x % kTeam;
  add_up(shared.sums, shared.tiles, num_sequences, threadIdx.x,
         [=](int i) { return tiles_of(query_start[i + 1] - query_start[i]); });
  wait_for_earlier_kernels();
  if (!kE4m3 && thread >= 32) return;  // nothing to widen
  constexpr int kStaying = kE4m3 ? kProducers : 64;
  Turn turn;
  Numbers numbers(counter);
  for (int round = 0;; ++round) {
    const int number = numbers.take(shared.next, round, kStaying);
    const Tile tile = tile_of(shared, number, query_start, context_lens, num_sequences);
    if (which == 1) bring_queries(shared, tile, maps, thread, round & 1);
    if (tile.num_tokens == 0) return;
    const Blocks blocks(tile, page_table, which);
    if constexpr (kE4m3) {
      widen_blocks(shared, tile, blocks, maps, turn, thread);
    } else {
      copy_blocks(shared, tile, blocks, maps, turn);
    }
  }
}

}  // namespace trtc
