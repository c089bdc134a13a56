// Tiles of attention on sm_90a, for sequences with several new tokens whose keys and values TMA copies.
//
// A tile is 128 rows: TOKENS new tokens of one sequence times the query heads of one KV head, token by token.
// Persistent blocks take tiles from an atomic counter. Three warpgroups of a block share the work:
//
//   128 producers    have Q, K and V copied, K and V in blocks of BLOCK_N keys; every kernel has its own
//   256 consumers    multiply 64 rows each group: scores of the next block beside the weighted sum of this one, with
//                    a running maximum between (attention/consumer_sm90.cuh)
//
// They meet at barriers: "full" when a part is there, "empty" when the products are through with it. Blocks of
// keys are anchored at position 0 and masked keys change no bit of a sum, so a row's result depends neither on the
// chunk it came in nor on the rest of the batch.
//
// Macros: those of attention/scores.cuh, and HEAD_DIM (of queries and keys) VALUE_DIM OUT_STRIDE SCALE; TOKENS BLOCK_N
// STAGES PRODUCER_REGISTERS CONSUMER_REGISTERS.
#pragma once

#include "attention/scores.cuh"
#include "gpu/hopper.cuh"
#include "gpu/tensor_map.cuh"

namespace trtc {

constexpr int kRows = 128;       // of a tile, two consumer warpgroups
constexpr int kConsumers = 256;  // threads
constexpr int kProducers = 128;  // threads
constexpr int kTeam = 64;        // threads that see to K, and as many to V
constexpr int kKeyPanels = (HEAD_DIM + 63) / 64;      // of operands, of 128 bytes a row
constexpr int kValuePanels = (VALUE_DIM + 63) / 64;
constexpr int kQueryBytes = kKeyPanels * kRows * 128;
constexpr int kKeyBytes = kKeyPanels * BLOCK_N * 128;  // of a block
constexpr int kValueBytes = kValuePanels * BLOCK_N * 128;
static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0, "operands are taken 16 elements at a time");
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
  unsigned long long query_full, query_empty;
  unsigned long long key_full[STAGES], key_empty[STAGES];
  unsigned long long value_full[STAGES], value_empty[STAGES];

  // By one thread, before any other comes to them.
  __device__ void make() {
    make_barrier(shared_address(&query_full), 1);
    make_barrier(shared_address(&query_empty), kConsumers / 32);
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&key_full[stage]), 1);
      make_barrier(shared_address(&value_full[stage]), 1);
      make_barrier(shared_address(&key_empty[stage]), kConsumers / 32);
      make_barrier(shared_address(&value_empty[stage]), kConsumers / 32);
    }
  }
};

// Which stage the n-th block goes through, and the parity of its turn there.
template <int kStages>
struct TurnOf {
  int number = 0;

  __device__ int stage() const { return number % kStages; }
  __device__ unsigned parity() const { return number / kStages & 1; }
  __device__ unsigned earlier() const { return parity() ^ 1; }
};
using Turn = TurnOf<STAGES>;

// before[i] = the amounts of the sequences before i, for i up to `count`; all producers together.
template <class Amount>
__device__ inline void add_up(int (&sums)[kProducers], int* before, int count, int thread,
                              Amount amount) {
  const int share = ceil_div(count, kProducers);
  const int begin = smaller(thread * share, count);
  const int end = smaller(begin + share, count);
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += amount(i);
  sums[thread] = sum;
  sync_threads(1, kProducers);
  int all_before = 0;
  for (int i = 0; i < thread; ++i) all_before += sums[i];
  for (int i = begin; i < end; ++i) {
    before[i] = all_before;
    all_before += amount(i);
  }
  if (thread == kProducers - 1) before[count] = all_before;
  sync_threads(1, kProducers);
}

// The tile of a KV head with so many before it, where `tiles` are those before each sequence.
__device__ inline Tile tile_at(const int* tiles, int number, int kv_head, const int* query_start,
                               const int* context_lens, int num_sequences) {
  int low = 0, high = num_sequences;  // tiles[low] <= number < tiles[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles[middle] <= number ? low : high) = middle;
  }
  const int begin = query_start[low], num_new = query_start[low + 1] - begin;
  const int first = (number - tiles[low]) * TOKENS;
  const int context = context_lens[low];
  return {begin + first,           smaller(TOKENS, num_new - first),
          context - num_new + first, context,
          low,                     kv_head};
}

// Numbers of tiles from a counter, which are requested a tile ahead.
struct Numbers {
  int* counter;
  int upcoming;

  __device__ explicit Numbers(int* counter)
      : counter(counter), upcoming(threadIdx.x == 0 ? atomicAdd(counter, 1) : 0) {}

  // The next one, which `threads` producers take together, by way of a pair that they share.
  __device__ int take(int (&next)[2], int round, int threads) {
    if (threadIdx.x == 0) {
      next[round % 2] = upcoming;
      upcoming = atomicAdd(counter, 1);
    }
    sync_threads(1, threads);
    return next[round % 2];
  }
};

// Has a tile's queries copied when those before them are done with; one warp. `copied` counts them. Rows beyond
// its tokens are whatever comes next. The map is of [tokens, heads, bytes].
template <class Shared>
__device__ inline void copy_queries(Shared& shared, const Tile& tile, const TensorMap* map, int thread,
                                    unsigned copied, unsigned parity) {
  const unsigned queries = shared_address(shared.queries);
  wait_at(shared_address(&shared.barriers.query_empty), parity ^ 1);
  if (thread == 0) {
    shared.tile = tile;
    arrive_and_expect(copied, tile.num_tokens > 0 ? kKeyPanels * TOKENS * kGroup * 128 : 0);
    for (int panel = 0; panel < kKeyPanels && tile.num_tokens > 0; ++panel) {
      copy_tile(queries + panel * kRows * 128, map, copied, panel * 128, tile.kv_head * kGroup,
                tile.first_row);
    }
  }
}

}  // namespace trtc
