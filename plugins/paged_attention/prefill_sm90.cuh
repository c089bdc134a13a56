// The tiles of prefill_sm90.cu, and what its producers and consumers share.
#pragma once

#include "attention/tiles_sm90.cuh"
#include "paged_attention/context.cuh"

namespace trtc {

constexpr int kPoolPanels = ceil_div(kRowBytes, 128);  // of K or V as they are in the pool
constexpr int kCopiedBytes = kPoolPanels * BLOCK_N * 128;
constexpr int kRawStages = larger(RAW_STAGES, 1);  // bf16 has none

struct Shared {
  alignas(1024) unsigned char queries[kQueryBytes];
  unsigned char keys[STAGES][kKeyBytes];
  unsigned char values[STAGES][kValueBytes];
  unsigned char raw[2][kRawStages][kE4m3 ? kCopiedBytes : 16];  // K and V as in the pool
  unsigned long long query_copied;
  Barriers barriers;
  unsigned long long raw_full[2][kRawStages];
  Tile tile;                      // that `queries` are of
  int next[2];                    // numbers from the counter, double-buffered
  int sums[kProducers];
  int tiles[MAX_SEQUENCES + 1];   // of the sequences before each, for one KV head
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

__device__ inline int tiles_of(int num_new) { return num_new > 1 ? ceil_div(num_new, TOKENS) : 0; }

// The tile of a number: the last tokens of the last sequence come first, which have the longest contexts, and KV heads
// change fastest.
__device__ inline Tile tile_of(const Shared& shared, int number, const int* query_start,
                               const int* context_lens, int num_sequences) {
  const int total = shared.tiles[num_sequences];
  if (number >= total * NUM_KV_HEADS) return {};
  return tile_at(shared.tiles, total - 1 - number / NUM_KV_HEADS, number % NUM_KV_HEADS, query_start,
                 context_lens, num_sequences);
}

}  // namespace trtc
