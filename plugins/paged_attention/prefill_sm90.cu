// Attention of sequences with several new tokens, on the tensor cores of sm_90a.
//
// A tile is 128 rows: TOKENS new tokens of one sequence times the query heads of one KV head, token
// by token. Programs stay and take tiles from a counter, longest contexts first, until there are no
// more. Three warpgroups share the work of a tile:
//
//   warps 0 and 1    copy Q, and K in blocks of BLOCK_N keys
//   warps 2 and 3    copy V
//   8 warps          multiply 64 rows each group: scores of the next block beside the weighted sum
//                    of this one, with a running maximum between. The groups take turns: while the
//                    tensor cores are at one's products the other works on its scores
//
// Copies and products meet at barriers: "full" when a part has been copied, "empty" when the products
// are through with it. Copies arrive there by themselves: a producer that waited for each block before
// it began the next one would be what all others wait for. Blocks of keys are anchored at position 0 and masked keys change no bit of a
// sum, so a row's result depends neither on the chunk it came in nor on the rest of the batch.
//
// Macros: those of context.cuh, and TOKENS BLOCK_N STAGES PRODUCER_REGISTERS CONSUMER_REGISTERS
// SHARED_BYTES MAX_SEQUENCES.
#include "cuda/hopper.cuh"
#include "cuda/quantize.cuh"
#include "paged_attention/context.cuh"

namespace trtc {

constexpr int kRows = 128;            // of a tile, two consumer warpgroups
constexpr int kConsumers = 256;       // threads
constexpr int kProducers = 128;       // threads
constexpr int kCopiers = 64;          // threads that copy K, and as many V
constexpr int kChunks = HEAD_DIM / 8;  // of 16 bytes in a row of operands
constexpr int kPanels = (HEAD_DIM + 63) / 64;
constexpr int kQueryBytes = kPanels * kRows * 128;
constexpr int kBlockBytes = kPanels * BLOCK_N * 128;
constexpr int kPages = BLOCK_N / PAGE_SIZE > 0 ? BLOCK_N / PAGE_SIZE : 1;  // of a block
static_assert(TOKENS * kGroup <= kRows);
static_assert(kPages <= 32);
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
  __device__ int first_key() const {
    return WINDOW > 0 ? larger(0, position - WINDOW + 1) : 0;
  }
  // Blocks of keys that some row sees: [first_block, end_block).
  __device__ int first_block() const { return first_key() / BLOCK_N; }
  __device__ int end_block() const { return last_position() / BLOCK_N + 1; }
};

struct Barriers {
  unsigned long long query_full, query_empty;
  unsigned long long key_full[STAGES], key_empty[STAGES];
  unsigned long long value_full[STAGES], value_empty[STAGES];
};

struct Shared {
  alignas(1024) unsigned char queries[kQueryBytes];
  unsigned char keys[STAGES][kBlockBytes];
  unsigned char values[STAGES][kBlockBytes];
  unsigned char raw[2][kE4m3 ? BLOCK_N * kRowBytes : 16];  // K and V as they are in the pool
  Barriers barriers;
  Tile tile;                      // that `queries` are of
  int next[2];                    // numbers from the counter, by turns
  int sums[kProducers];
  int tiles[MAX_SEQUENCES + 1];   // of the sequences before each, for one KV head
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// Which stage the n-th block goes through, and the parity of its turn there.
struct Turn {
  int number = 0;

  __device__ int stage() const { return number % STAGES; }
  __device__ unsigned parity() const { return number / STAGES & 1; }
  __device__ unsigned earlier() const { return parity() ^ 1; }
};

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

// Where a chunk of operands goes, in panels of kPanelRows rows.
template <int kPanelRows>
__device__ inline unsigned place(int row, int chunk) {
  return chunk / 8 * (kPanelRows * 128) + panel_offset(row, chunk % 8);
}

// Keys or values of one tile.
struct Blocks {
  const unsigned char* plane;  // of the pool's page 0, for the tile's KV head
  const int* pages;            // of the tile's sequence
  int first, end;              // keys outside are zeros

  __device__ Blocks(const Tile& tile, const unsigned char* pool, const int* page_table, int which)
      : plane(pool + which * kPlaneBytes + tile.kv_head * kRowBytes),
        pages(page_table + static_cast<long long>(tile.sequence) * TABLE_WIDTH),
        first(tile.first_key()),
        end(tile.context) {}

  // Each lane's page of a block.
  __device__ int page_of(int block) const {
    const int lane = threadIdx.x % 32, key = block * BLOCK_N + lane * PAGE_SIZE;
    return lane < kPages && key < end ? pages[key / PAGE_SIZE] : 0;
  }

  // The number-th page of a block, shuffled from the lane that has it.
  __device__ const unsigned char* page_at(int page, int number) const {
    const long long there = __shfl_sync(0xffffffffu, page, number);
    return plane + there * kPageBytes;
  }
  __device__ static int row_in_page(int block, int row) {
    return (block * BLOCK_N % PAGE_SIZE + row) % PAGE_SIZE;
  }

  __device__ bool is_live(int key) const { return key >= first && key < end; }
};

constexpr int kRowChunks = kRowBytes / 16;             // of the pool
constexpr int kPassRows = kCopiers / kRowChunks;       // that the copiers take at once
constexpr int kPasses = ceil_div(BLOCK_N, kPassRows);  // over a block
static_assert(kPassRows > 0);

// This thread's chunks of a block: the same one of every kPassRows-th row.
struct Items {
  int row, chunk;  // of the first

  __device__ explicit Items(int thread) : row(thread / kRowChunks), chunk(thread % kRowChunks) {}
  __device__ bool has(int pass) const {
    return (kCopiers % kRowChunks == 0 || row < kPassRows) &&
           (BLOCK_N % kPassRows == 0 || pass * kPassRows + row < BLOCK_N);
  }
  __device__ int row_of(int pass) const { return pass * kPassRows + row; }
};

// Starts the copies of this thread's part of a block: of operands to their places, of E4M3 to a
// buffer that no other thread looks at.
__device__ inline void start_block(const Blocks& blocks, int block, int page, unsigned to,
                                   Items items) {
  const unsigned char* rows = nullptr;  // of the page's first
#pragma unroll 8
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = items.row_of(pass);
    if (PAGE_SIZE % kPassRows != 0 || pass * kPassRows % PAGE_SIZE == 0) {
      rows = blocks.page_at(page, row / PAGE_SIZE) + items.chunk * 16;
    }
    if (!items.has(pass)) continue;
    const int offset =
        kE4m3 ? row * kRowBytes + items.chunk * 16 : place<BLOCK_N>(row, items.chunk);
    copy_async_16(to + offset, rows + blocks.row_in_page(block, row) * kTokenBytes,
                  blocks.is_live(block * BLOCK_N + row) ? 16 : 0);
  }
}

// Makes operands of this thread's part of a block of E4M3.
__device__ inline void widen_block(unsigned from, unsigned to, Items items) {
#pragma unroll 4
  for (int pass = 0; pass < kPasses; ++pass) {
    if (!items.has(pass)) continue;
    const int row = items.row_of(pass);
    const uint4 words = load_shared(from + row * kRowBytes + items.chunk * 16);
    const uint2 a = e4m3_to_f16(words.x), b = e4m3_to_f16(words.y);
    const uint2 c = e4m3_to_f16(words.z), d = e4m3_to_f16(words.w);
    store_shared(to + place<BLOCK_N>(row, 2 * items.chunk), {a.x, a.y, b.x, b.y});
    store_shared(to + place<BLOCK_N>(row, 2 * items.chunk + 1), {c.x, c.y, d.x, d.y});
  }
}

// Copies the tile's queries; rows beyond its tokens are zeros.
__device__ inline void copy_queries(const Tile& tile, const Bf16* q, unsigned to, int thread) {
  constexpr int kQueryItems = kRows * kChunks / kCopiers;
  q += static_cast<long long>(tile.first_row) * Q_STRIDE + tile.kv_head * kGroup * HEAD_DIM;
#pragma unroll 4
  for (int i = 0; i < kQueryItems; ++i) {
    const int item = i * kCopiers + thread, row = item / kChunks, chunk = item % kChunks;
    const int token = row / kGroup;
    const bool live = token < tile.num_tokens;
    const Bf16* const from = q + static_cast<long long>(live ? token : 0) * Q_STRIDE +
                             row % kGroup * HEAD_DIM + chunk * 8;
    copy_async_16(to + place<kRows>(row, chunk), from, live ? 16 : 0);
  }
  if constexpr (kE4m3) {
    commit_copies();
    wait_for_copies<0>();
#pragma unroll 4
    for (int i = 0; i < kQueryItems; ++i) {
      const int item = i * kCopiers + thread;
      const unsigned at = to + place<kRows>(item / kChunks, item % kChunks);
      const uint4 pairs = load_shared(at);
      store_shared(at, {query_operand(pairs.x), query_operand(pairs.y), query_operand(pairs.z),
                        query_operand(pairs.w)});
    }
  }
}

// Operands that are copied as they are arrive by themselves; E4M3 is made operands of first, and a
// warp says when it has.
constexpr int kArrivals = kE4m3 ? kCopiers / 32 : kCopiers;

// What this thread copied is there, or will be when the barrier says so.
__device__ inline void publish(unsigned long long& full) {
  if constexpr (kE4m3) {
    publish_to_products();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(&full));
  } else {
    arrive_when_copied(shared_address(&full));
  }
}

// Until a part that copiers publish has been copied.
__device__ inline void await_copies(unsigned long long& full, unsigned parity) {
  wait_at(shared_address(&full), parity);
  if constexpr (!kE4m3) publish_to_products();
}

// Copies K (warps 0 and 1) or Q and V (warps 2 and 3) of tile after tile.
__device__ inline void produce(Shared& shared, const Bf16* q, const unsigned char* pool,
                               const int* query_start, const int* context_lens,
                               const int* page_table, int num_sequences, int* counter) {
  const int which = threadIdx.x / kCopiers, thread = threadIdx.x % kCopiers;
  const Items items(thread);
  Barriers& barriers = shared.barriers;
  count_tiles(shared, query_start, num_sequences, threadIdx.x);
  wait_for_earlier_kernels();
  Turn turn;
  int upcoming = threadIdx.x == 0 ? atomicAdd(counter, 1) : 0;  // asked for a tile ahead
  for (int round = 0;; ++round) {
    if (threadIdx.x == 0) {
      shared.next[round % 2] = upcoming;
      upcoming = atomicAdd(counter, 1);
    }
    sync_threads(1, kProducers);
    const Tile tile =
        tile_of(shared, shared.next[round % 2], query_start, context_lens, num_sequences);
    if (which == 1) {
      wait_at(shared_address(&barriers.query_empty), (round & 1) ^ 1);
      if (thread == 0) {
        shared.tile = tile;
        arrive(shared_address(&barriers.query_full));
      }
      if (tile.num_tokens > 0) copy_queries(tile, q, shared_address(shared.queries), thread);
      publish(barriers.query_full);
    }
    if (tile.num_tokens == 0) return;
    const Blocks blocks(tile, pool, page_table, which);
    const unsigned raw = shared_address(shared.raw[which]);
    int page = blocks.page_of(tile.first_block());
    if constexpr (kE4m3) start_block(blocks, tile.first_block(), page, raw, items);
    for (int block = tile.first_block(); block < tile.end_block(); ++block, ++turn.number) {
      const int stage = turn.stage(), next_page = blocks.page_of(block + 1);
      const unsigned to =
          shared_address(which == 0 ? shared.keys[stage] : shared.values[stage]);
      wait_at(shared_address(which == 0 ? &barriers.key_empty[stage] : &barriers.value_empty[stage]),
              turn.earlier());
      if constexpr (kE4m3) {
        commit_copies();
        wait_for_copies<0>();
        widen_block(raw, to, items);
      } else {
        start_block(blocks, block, page, to, items);
      }
      publish(which == 0 ? barriers.key_full[stage] : barriers.value_full[stage]);
      if (kE4m3 && block + 1 < tile.end_block()) {
        start_block(blocks, block + 1, next_page, raw, items);
      }
      page = next_page;
    }
  }
}

// Running softmax of a consumer's two rows, g and g + 8 of its warp's 16.
struct Rows {
  float largest[2];  // score, in units of log2
  float total[2];    // of weights, of this lane's keys only
  float shrink[2];   // what was summed before the last block is worth after it: 1 if nothing grew

  __device__ Rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = -infinity();
      total[i] = 0.f;
    }
  }

  // Of the tile.
  __device__ static int number(int i) {
    return (threadIdx.x - kProducers) / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
  }

  // Whether what was summed before changes, for some row of this warp.
  __device__ bool shrank() const {
    return __any_sync(0xffffffffu, shrink[0] != 1.f || shrink[1] != 1.f);
  }

  // Scores of a block become weights, in place. `scale` is of scores in units of log2.
  __device__ void weigh(float (&scores)[BLOCK_N / 2], const Tile& tile, int block, float scale) {
    if constexpr (SOFTCAP > 0) {
#pragma unroll
      for (float& one : scores) one = score(one, scale / kLog2E);
      scale = 1.f;
    }
    const int begin = block * BLOCK_N;
    if (begin + BLOCK_N - 1 > tile.position ||
        (WINDOW > 0 && begin <= tile.last_position() - WINDOW)) {
      mask(scores, tile, begin);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = -infinity();
#pragma unroll
      for (int at = 2 * i; at < BLOCK_N / 2; at += 4) {
        most = fmaxf(most, fmaxf(scores[at], scores[at + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = fmaxf(largest[i], most * scale);
      // A row whose window begins in a later block has seen nothing yet.
      const float reference = WINDOW > 0 && most == -infinity() ? 0.f : most;
      shrink[i] = exp2_approx(largest[i] - reference);
      largest[i] = most;
      float sum = 0.f;
#pragma unroll
      for (int at = 2 * i; at < BLOCK_N / 2; at += 4) {
        scores[at] = exp2_approx(fmaf(scores[at], scale, -reference));
        scores[at + 1] = exp2_approx(fmaf(scores[at + 1], scale, -reference));
        sum += scores[at] + scores[at + 1];
      }
      total[i] = fmaf(total[i], shrink[i], sum);
    }
  }

  __device__ static void mask(float (&scores)[BLOCK_N / 2], const Tile& tile, int begin) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int last = tile.position + number(i) / kGroup - begin - threadIdx.x % 4 * 2;
#pragma unroll
      for (int at = 2 * i; at < BLOCK_N / 2; at += 4) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int key = at / 4 * 8 + odd;  // from this lane's first
          if (key > last || (WINDOW > 0 && key <= last - WINDOW)) scores[at + odd] = -infinity();
        }
      }
    }
  }
};

// Issues scores [64, BLOCK_N] = Q . K^T.
__device__ inline void multiply_keys(float (&scores)[BLOCK_N / 2], unsigned queries, unsigned keys) {
  begin_products();
  forget(queries);  // 64-bit operands for every step would not fit in registers
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int panel = step / 4, in_panel = step % 4 * 32;
    multiply_shared<Operand, BLOCK_N>(
        scores, operand_in_panels(queries + panel * kRows * 128 + in_panel, 0),
        operand_in_panels(keys + panel * BLOCK_N * 128 + in_panel, 0), step > 0);
  }
  commit_products();
}

// Issues sums [64, kColumn...] += weights [64, 16] . V [16, kColumn...] in the widest products.
template <int kColumn>
__device__ inline void multiply_columns(float (&sums)[HEAD_DIM / 2], const unsigned (&weights)[4],
                                        unsigned values) {
  if constexpr (kColumn < HEAD_DIM) {
    constexpr int kRest = HEAD_DIM - kColumn;
    constexpr int kColumns = kRest >= 128 ? 128 : kRest >= 64 ? 64 : kRest >= 32 ? 32 : 16;
    multiply_registers<Operand, kColumns>(
        reinterpret_cast<float(&)[kColumns / 2]>(sums[kColumn / 2]), weights,
        operand_in_panels(values + kColumn / 64 * (BLOCK_N * 128) + kColumn % 64 * 2,
                          BLOCK_N * 128));
    multiply_columns<kColumn + kColumns>(sums, weights, values);
  }
}

__device__ inline void multiply_values(float (&sums)[HEAD_DIM / 2],
                                       const unsigned (&weights)[BLOCK_N / 16][4], unsigned values) {
  begin_products();
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
    multiply_columns<0>(sums, weights[step], values + step * 16 * 128);
  }
  commit_products();
}

// The weights of a block, as the second product's left operand.
__device__ inline void pack(const float (&scores)[BLOCK_N / 2], unsigned (&weights)[BLOCK_N / 16][4]) {
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      weights[step][part] =
          weight_operand(scores[8 * step + 2 * part], scores[8 * step + 2 * part + 1]);
    }
  }
}

// This warp is through with a part: one of its barrier's eight arrivals.
__device__ inline void release(unsigned long long& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared_address(&empty));
}

// Writes sums / total; neighbouring lanes exchange halves so that each has four columns in a row.
__device__ inline void store(const Rows& rows, const float (&sums)[HEAD_DIM / 2], const Tile& tile,
                             Out* out, const float* v_scale, const float* pre_scale,
                             const float* out_scale) {
  const int t = threadIdx.x % 4;
  const bool odd = t % 2;
  const Quantizer<Out> quantizer(pre_scale, out_scale);
  const float scale = value_or_one(v_scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = rows.total[i];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float by = scale / total;
    const int row = Rows::number(i), token = row / kGroup;
    const int head = tile.kv_head * kGroup + row % kGroup;
    Out* const to = out + static_cast<long long>(tile.first_row + token) * OUT_STRIDE;
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += 16) {
      const float* const pair = sums + column / 2 + 2 * i;
      const float mine[2] = {(odd ? pair[4] : pair[0]) * by, (odd ? pair[5] : pair[1]) * by};
      float theirs[2] = {(odd ? pair[0] : pair[4]) * by, (odd ? pair[1] : pair[5]) * by};
#pragma unroll
      for (float& one : theirs) one = __shfl_xor_sync(0xffffffffu, one, 1);
      const float four[4] = {odd ? theirs[0] : mine[0], odd ? theirs[1] : mine[1],
                             odd ? mine[0] : theirs[0], odd ? mine[1] : theirs[1]};
      if (token < tile.num_tokens) {
        quantizer.store(to, head * HEAD_DIM + column + (odd ? 6 + 2 * t : 2 * t), four);
      }
    }
  }
}

// Which group may issue the products of a block: the first one first.
struct Turns {
  int group;

  __device__ explicit Turns(int group) : group(group) {
    if (group != 0) pass_on();
  }
  __device__ void await() const { sync_threads(kFirst + group, kConsumers); }
  __device__ void pass_on() const { arrive_at_threads(kFirst + 1 - group, kConsumers); }

  static constexpr int kFirst = 2;  // hardware barrier; the producers have 1
};

// Multiplies 64 rows of tile after tile.
__device__ inline void consume(Shared& shared, Out* out, const float* k_scale, const float* v_scale,
                               const float* pre_scale, const float* out_scale) {
  Barriers& barriers = shared.barriers;
  const Turns turns((threadIdx.x - kProducers) / 128);
  const unsigned queries = shared_address(shared.queries) + turns.group * 64 * 128;
  const float scale = static_cast<float>(SCALE) * kLog2E * value_or_one(k_scale);
  float scores[BLOCK_N / 2] = {};
  Turn turn;
  for (int round = 0;; ++round) {
    await_copies(barriers.query_full, round & 1);
    const Tile tile = shared.tile;
    if (tile.num_tokens == 0) return;
    Rows rows;
    float sums[HEAD_DIM / 2] = {};
    unsigned weights[BLOCK_N / 16][4];

    const auto await_keys = [&] {
      await_copies(barriers.key_full[turn.stage()], turn.parity());
    };
    const auto keys = [&] {
      multiply_keys(scores, queries, shared_address(shared.keys[turn.stage()]));
    };
    const auto values = [&](Turn of) {
      await_copies(barriers.value_full[of.stage()], of.parity());
      multiply_values(sums, weights, shared_address(shared.values[of.stage()]));
    };

    int block = tile.first_block();
    await_keys();
    keys();
    wait_for_products<0>();
    settle(scores);
    release(barriers.key_empty[turn.stage()]);
    rows.weigh(scores, tile, block, scale);
    pack(scores, weights);
    for (++block; block < tile.end_block(); ++block) {
      const Turn previous = turn;
      ++turn.number;
      await_keys();
      turns.await();
      keys();
      values(previous);
      turns.pass_on();
      wait_for_products<1>();
      settle(scores);
      release(barriers.key_empty[turn.stage()]);
      rows.weigh(scores, tile, block, scale);
      finish_before_waiting(rows.total[0] + rows.total[1]);
      wait_for_products<0>();
      settle(sums);
      release(barriers.value_empty[previous.stage()]);
      if (rows.shrank()) {
#pragma unroll
        for (int at = 0; at < HEAD_DIM / 2; ++at) sums[at] *= rows.shrink[at % 4 / 2];
      }
      pack(scores, weights);
    }
    release(barriers.query_empty);
    values(turn);
    wait_for_products<0>();
    settle(sums);
    release(barriers.value_empty[turn.stage()]);
    ++turn.number;
    store(rows, sums, tile, out, v_scale, pre_scale, out_scale);
  }
}

}  // namespace trtc

using namespace trtc;

// Grid: (programs, 1, 1), as many as fit on a chip. `counter` is 0.
extern "C" __global__ void __launch_bounds__(kProducers + kConsumers, 1)
attention_prefill(const Bf16* q, const unsigned char* pool, const int* query_start,
                  const int* context_lens, const int* page_table, K_SCALE_PARAMETER V_SCALE_PARAMETER
                  PRE_SCALE_PARAMETER OUT_SCALE_PARAMETER const int* dims, Out* out, int* counter) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    Barriers& barriers = shared.barriers;
    make_barrier(shared_address(&barriers.query_full), kArrivals + 1);
    make_barrier(shared_address(&barriers.query_empty), kConsumers / 32);
    for (int stage = 0; stage < STAGES; ++stage) {
      make_barrier(shared_address(&barriers.key_full[stage]), kArrivals);
      make_barrier(shared_address(&barriers.value_full[stage]), kArrivals);
      make_barrier(shared_address(&barriers.key_empty[stage]), kConsumers / 32);
      make_barrier(shared_address(&barriers.value_empty[stage]), kConsumers / 32);
    }
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    give_registers<PRODUCER_REGISTERS>();
    produce(shared, q, pool, query_start, context_lens, page_table, dims[1], counter);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(shared, out, k_scale, v_scale, pre_scale, out_scale);
  }
}
