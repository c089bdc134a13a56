// The tiles of prefill_sm90.cu, and what its producers and consumers share.
//
// A tile is 128 rows: TOKENS new tokens of one sequence times the query heads of one KV head, token
// by token. Persistent blocks take tiles from an atomic counter, longest contexts first.
#pragma once

#include "gpu/hopper.cuh"
#include "paged_attention/context.cuh"

namespace trtc {

constexpr int kRows = 128;            // of a tile, two consumer warpgroups
constexpr int kConsumers = 256;       // threads
constexpr int kProducers = 128;       // threads
constexpr int kTeam = 64;             // threads that see to K, and as many to V
constexpr int kPanels = (HEAD_DIM + 63) / 64;          // of operands, of 128 bytes a row
constexpr int kPoolPanels = ceil_div(kRowBytes, 128);  // of K or V as they are in the pool
constexpr int kQueryBytes = kPanels * kRows * 128;
constexpr int kBlockBytes = kPanels * BLOCK_N * 128;
constexpr int kCopiedBytes = kPoolPanels * BLOCK_N * 128;
constexpr int kRawStages = larger(RAW_STAGES, 1);  // bf16 has none
static_assert(TOKENS * kGroup <= kRows);
// A program is given 168 registers a thread, and has no more to share out.
static_assert(kProducers * PRODUCER_REGISTERS + kConsumers * CONSUMER_REGISTERS <=
              (kProducers + kConsumers) * 168);

// What a tile is.
struct Tile {
  int first_row;    // of the step: its first token
  int num_tokens;   // 0: there are no more tiles
  int position;     // of its first token
  int context;      // tokens of the sequence
  int sequence, kv_head;

  __device__ int last_position() const { return position + num_tokens - 1; }
  __device__ int first_key() const { return first_seen(position); }
  // Blocks of keys that some row sees: [first_block, end_block).
  __device__ int first_block() const { return first_key() / BLOCK_N; }
  __device__ int end_block() const { return last_position() / BLOCK_N + 1; }
};

struct Barriers {
  unsigned long long query_copied, query_full, query_empty;
  unsigned long long key_full[STAGES], key_empty[STAGES];
  unsigned long long value_full[STAGES], value_empty[STAGES];
  unsigned long long raw_full[2][kRawStages];
};

struct Shared {
  alignas(1024) unsigned char queries[kQueryBytes];
  unsigned char keys[STAGES][kBlockBytes];
  unsigned char values[STAGES][kBlockBytes];
  unsigned char raw[2][kRawStages][kE4m3 ? kCopiedBytes : 16];  // K and V as in the pool
  Barriers barriers;
  Tile tile;                      // that `queries` are of
  int next[2];                    // numbers from the counter, double-buffered
  int sums[kProducers];
  int tiles[MAX_SEQUENCES + 1];   // of the sequences before each, for one KV head
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// Which stage the n-th block goes through, and the parity of its turn there.
template <int kStages>
struct TurnOf {
  int number = 0;

  __device__ int stage() const { return number % kStages; }
  __device__ unsigned parity() const { return number / kStages & 1; }
  __device__ unsigned earlier() const { return parity() ^ 1; }
};
using Turn = TurnOf<STAGES>;

__device__ inline int tiles_of(int num_new) { return num_new > 1 ? ceil_div(num_new, TOKENS) : 0; }

// Counts the tiles of every sequence; all producers together.
__device__ inline void count_tiles(Shared& shared, const int* query_start, int num_sequences,
                                   int thread) {
  const int share = ceil_div(num_sequences, kProducers);
  const int begin = smaller(thread * share, num_sequences);
  const int end = smaller(begin + share, num_sequences);
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += tiles_of(query_start[i + 1] - query_start[i]);
  shared.sums[thread] = sum;
  sync_threads(1, kProducers);
  int before = 0;
  for (int i = 0; i < thread; ++i) before += shared.sums[i];
  for (int i = begin; i < end; ++i) {
    shared.tiles[i] = before;
    before += tiles_of(query_start[i + 1] - query_start[i]);
  }
  if (thread == kProducers - 1) shared.tiles[num_sequences] = before;
  sync_threads(1, kProducers);
}

// The tile of a number: the last tokens of the last sequence come first, KV heads change fastest.
__device__ inline Tile tile_of(const Shared& shared, int number, const int* query_start,
                               const int* context_lens, int num_sequences) {
  const int total = shared.tiles[num_sequences];
  if (number >= total * NUM_KV_HEADS) return {};
  const int wanted = total - 1 - number / NUM_KV_HEADS;
  int low = 0, high = num_sequences;  // tiles[low] <= wanted < tiles[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (shared.tiles[middle] <= wanted ? low : high) = middle;
  }
  const int begin = query_start[low], num_new = query_start[low + 1] - begin;
  const int first = (wanted - shared.tiles[low]) * TOKENS;
  const int context = context_lens[low];
  return {begin + first,           smaller(TOKENS, num_new - first),
          context - num_new + first, context,
          low,                     number % NUM_KV_HEADS};
}

}  // namespace trtc
