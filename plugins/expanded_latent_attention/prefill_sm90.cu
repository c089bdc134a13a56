// Attention of prompts to the keys and values that latents were expanded to, on the tensor cores of sm_90a.
//
// Keys are [heads, ROOM, HEAD_DIM] and values [heads, ROOM, VALUE_DIM] of bf16. Tiles are those of
// attention/tiles_sm90.cuh; sequences that are not expanded have none. Of the producers, warp 0 has K copied, and warp 2
// has Q and V copied, a block of a sequence at once: behind its last token, up to a multiple of ALIGNMENT, are zeros.
//
// Macros: those of latents/expansion.cuh and attention/tiles_sm90.cuh that are not below, and SEQUENCES (at most)
// SHARED_BYTES.
#define NUM_KV_HEADS NUM_HEADS
#define TOKENS 128
#define WINDOW 0
#define CHUNKED 0
#define SOFTCAP 0
#include "attention/consumer_sm90.cuh"
#include "latents/expansion.cuh"

namespace trtc {

static_assert(ALIGNMENT % BLOCK_N == 0, "a block is of one sequence");

struct Shared {
  alignas(1024) unsigned char queries[kQueryBytes];
  unsigned char keys[STAGES][kKeyBytes];
  unsigned char values[STAGES][kValueBytes];
  Barriers barriers;
  Tile tile;                       // that `queries` are of
  int next[2];                     // numbers from the counter, double-buffered
  int sums[kProducers];
  int begins[SEQUENCES + 1];   // tokens that the sequences before each ask for
  int tiles[SEQUENCES + 1];    // of the sequences before each, for one head
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// The step's sequences: what the host wrote.
struct Step {
  const int *query_start, *context_lens;
  int num_sequences;

  __device__ int num_new(int sequence) const {
    return query_start[sequence + 1] - query_start[sequence];
  }
  __device__ int asks(int sequence) const {
    return asked(num_new(sequence), context_lens[sequence]);
  }
};

// Q [tokens, heads, bytes]; keys and values [heads * ROOM, bytes].
struct Maps {
  const TensorMap *queries, *keys, *values;
};

__device__ inline void count_tiles(Shared& shared, const Step& step, int thread) {
  add_up(shared.sums, shared.begins, step.num_sequences, thread,
         [&](int sequence) { return step.asks(sequence); });
  add_up(shared.sums, shared.tiles, step.num_sequences, thread, [&](int sequence) {
    const bool takes = is_expanded(shared.begins[sequence], step.asks(sequence));
    return takes ? ceil_div(step.num_new(sequence), TOKENS) : 0;
  });
}

// The tile of a number: the last tokens of the last sequence come first, and heads change fastest.
__device__ inline Tile tile_of(const Shared& shared, const Step& step, int number) {
  const int total = shared.tiles[step.num_sequences];
  if (number >= total * NUM_HEADS) return {};
  return tile_at(shared.tiles, total - 1 - number / NUM_HEADS, number % NUM_HEADS, step.query_start,
                 step.context_lens, step.num_sequences);
}

// Has kPanels panels of a block copied, from a row on; one warp.
template <int kPanels>
__device__ inline void copy_block(unsigned to, const TensorMap* map, int row, unsigned full) {
  static_assert(kPanels <= 32, "every panel has a lane that has it copied");
  const int lane = threadIdx.x % 32;
  if (lane == 0) arrive_and_expect(full, kPanels * BLOCK_N * 128);
  __syncwarp();
  if (lane < kPanels) copy_tile(to + lane * BLOCK_N * 128, map, full, lane * 128, row);
}

// Has K (warp 0) or Q and V (warp 2) of tile after tile copied.
__device__ inline void produce(Shared& shared, const Maps& maps, const Step& step, int* counter) {
  const int which = threadIdx.x / kTeam, thread = threadIdx.x % kTeam;
  count_tiles(shared, step, threadIdx.x);
  wait_for_earlier_kernels();
  if (thread >= 32) return;
  Barriers& barriers = shared.barriers;
  Turn turn;
  Numbers numbers(counter);
  for (int round = 0;; ++round) {
    const Tile tile = tile_of(shared, step, numbers.take(shared.next, round, 64));
    if (which == 1) {
      copy_queries(shared, tile, maps.queries, thread, shared_address(&barriers.query_full),
                   round & 1);
    }
    if (tile.num_tokens == 0) return;
    const int first = tile.kv_head * ROOM + shared.begins[tile.sequence];
    for (int block = 0; block < tile.end_block(); ++block, ++turn.number) {
      const int stage = turn.stage(), row = first + block * BLOCK_N;
      if (which == 0) {
        wait_at(shared_address(&barriers.key_empty[stage]), turn.earlier());
        copy_block<kKeyPanels>(shared_address(shared.keys[stage]), maps.keys, row,
                               shared_address(&barriers.key_full[stage]));
      } else {
        wait_at(shared_address(&barriers.value_empty[stage]), turn.earlier());
        copy_block<kValuePanels>(shared_address(shared.values[stage]), maps.values, row,
                                 shared_address(&barriers.value_full[stage]));
      }
    }
  }
}

}  // namespace trtc

using namespace trtc;

// Grid: (programs, 1, 1), as many as fit on a chip. `counter` is 0.
extern "C" __global__ void __launch_bounds__(kProducers + kConsumers, 1)
expanded_attention(const int* query_start, const int* context_lens, const int* dims, Bf16* out,
                   int* counter, const TensorMap* query_map, const TensorMap* key_map,
                   const TensorMap* value_map) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    shared.barriers.make();
    publish_to_products();  // and to TMA
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    give_registers<PRODUCER_REGISTERS>();
    produce(shared, {query_map, key_map, value_map}, {query_start, context_lens, dims[1]}, counter);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume<Bf16>(shared, out, nullptr, nullptr, nullptr, nullptr, nullptr);
  }
}
