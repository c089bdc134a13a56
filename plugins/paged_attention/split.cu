// Attention of sequences with one new token, their contexts split over programs: each takes one
// split of a sequence's keys for one KV head and leaves (largest score, sum of weights, weighted sum
// of V) for combine.cu, or the result where the sequence has one split only.
//
// Reading K and V once is the bound. A warp takes
// tiles of 16 keys in turn, STAGES of them on their way to its own part of shared memory, whole rows
// at a time. Both products run on the tensor cores:
//
//   scores  [heads, keys] = Q [heads, d] . K^T [d, keys]
//   sums^T  [d, heads]    = V^T [d, keys] . weights^T [keys, heads]
//
// Transposed in the second, the weights stay in the registers in which the first product left them
// (heads are 8 columns there, or 16). Which element of d is which row or column of a product is free
// to choose: so that every lane reads whole 4 to 16-byte chunks of the rows of K and V.
//
// Macros: those of context.cuh, and HEAD_TILES (programs of a KV head) WARPS STAGES SHARED_BYTES.
#include "gpu/quantize.cuh"
#include "paged_attention/context.cuh"

namespace trtc {

constexpr int kHeads = (kGroup + HEAD_TILES - 1) / HEAD_TILES;  // of a program
constexpr int kColumns = (kHeads + 7) / 8;  // groups of 8 heads

// The widest part of a row that `lanes` lanes can share evenly, if any can.
constexpr __device__ int chunk_bytes(int lanes) {
  return kRowBytes % (16 * lanes) == 0 ? 16 : kRowBytes % (8 * lanes) == 0 ? 8 : 4;
}

// A lane's share of a key: chunks t, t + 4, ...
constexpr int kKeyChunk = chunk_bytes(4);
constexpr int kKeyChunks = kRowBytes / (4 * kKeyChunk);
constexpr int kKeyWords = kKeyChunk / 4;
constexpr int kKeyElements = 8 * kKeyChunk / kBits;
// A lane's share of a value: chunks g, g + 8, ...; the last may lie beyond the row.
constexpr int kValueChunk = chunk_bytes(8);
constexpr int kValueChunks = (kRowBytes + 8 * kValueChunk - 1) / (8 * kValueChunk);
constexpr bool kValuesFit = kRowBytes % (8 * kValueChunk) == 0;
constexpr int kValueWords = kValueChunk / 4;
constexpr int kValueElements = 8 * kValueChunk / kBits;
constexpr int kRowTiles = kValueChunks * kValueElements / 2;  // groups of 16 elements of d

// Shared memory of a warp: stages of 16 rows of K, then of V, and their scales; at the end its sums. Rows are as far
// apart as it takes for lanes that read together to meet different banks.
constexpr int kKeyPitch = kRowBytes / (4 * kKeyChunk) % 2 ? kRowBytes : kRowBytes + 4 * kKeyChunk;
constexpr int kValuePitch = (kRowBytes + 47) / 64 * 64 + 16;
constexpr int kKeyBytes = kTile * kKeyPitch;
constexpr int kScalesAt = kTile * (kKeyPitch + kValuePitch);  // of keys, then of values
constexpr int kStageBytes = kScalesAt + 2 * kTile * SCALE_BYTES;
constexpr int kSumsPitch = HEAD_DIM + 4;  // floats
constexpr int kSumsBytes = 8 * kColumns * kSumsPitch * 4;
constexpr int kWarpBytes = STAGES * kStageBytes > kSumsBytes ? STAGES * kStageBytes : kSumsBytes;
constexpr int kStatsBytes = WARPS * 8 * kColumns * 8;  // float2 (largest, total) of each head
constexpr int kQueryBytes = kPacked ? kHeads * HEAD_DIM * 2 : 0;  // turned as packed keys are
static_assert(WARPS * kWarpBytes + kStatsBytes + kQueryBytes == SHARED_BYTES);
static_assert(kHeads <= 16);

struct Lane {
  int number = threadIdx.x % 32;
  int g = number / 4, t = number % 4;
};

// A chunk of 4, 8 or 16 bytes.
template <int kWords>
struct alignas(4 * kWords) Words {
  unsigned word[kWords];
};

// A lane's i-th 16 bytes of the 16 rows of a tile.
struct Item {
  int row, chunk;

  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kCount = (kTile * kChunks + 31) / 32;

  __device__ Item(int i, int lane) {
    if constexpr (32 % kChunks == 0) {
      row = i * (32 / kChunks) + lane / kChunks;
      chunk = lane % kChunks;
    } else {
      row = (i * 32 + lane) / kChunks;
      chunk = (i * 32 + lane) % kChunks;
    }
  }
};

// Copies this warp's tiles of a split to its stages, each to the next one.
struct Fetcher {
  const unsigned char* head;  // of the pool's page 0, for this KV head
  const unsigned char* scales;  // of its keys there
  const int* pages;           // of the sequence
  int first, end;             // keys that are seen
  int next, split_end;        // tile to copy next; all are before split_end
  unsigned stages;
  unsigned long long policy;
  int lane;
  int number = 0;  // of the tile
  int2 page = {};  // of the two halves of tile 32 * (number / 32) + lane

  static constexpr int kStride = WARPS * kTile;

  // Copies of an empty group where there is no tile any more.
  __device__ void fetch() {
    if (next < split_end) {
      if (number % 32 == 0) look_up(next + lane * kStride);
      const int2 mine = {__shfl_sync(0xffffffffu, page.x, number % 32),
                         PAGE_SIZE < kTile ? __shfl_sync(0xffffffffu, page.y, number % 32) : 0};
      const unsigned char* const low = head + mine.x * kPageBytes + next % PAGE_SIZE * kTokenBytes;
      const unsigned char* const high =
          PAGE_SIZE < kTile ? head + mine.y * kPageBytes - 8 * kTokenBytes : low;
      const unsigned to = stages + number % STAGES * kStageBytes;
      if (next >= first && next + kTile <= end) {
        copy_rows<true>(low, high, to);
      } else {
        copy_rows<false>(low, high, to);
      }
      if constexpr (kScaled) copy_scales(mine, to + kScalesAt);
      next += kStride;
      ++number;
    }
    commit_copies();
  }

  __device__ void look_up(int tile) {
    if (tile >= split_end) return;
    page.x = pages[tile / PAGE_SIZE];
    if (PAGE_SIZE < kTile && tile + 8 < end) page.y = pages[(tile + 8) / PAGE_SIZE];
  }

  // A lane's of 16 keys and values. Those that are not seen, whose weights are 0, get a neighbour's.
  __device__ void copy_scales(int2 tile_pages, unsigned to) const {
    const int row = smaller(larger(lane % kTile, first - next), end - 1 - next);
    const int in_page = PAGE_SIZE < kTile && row >= 8 ? tile_pages.y : tile_pages.x;
    const int token = (next + row) % PAGE_SIZE;
    copy_async_4(to + lane * 4, scales + in_page * kPageBytes + lane / kTile * kPlaneBytes +
                                    token * NUM_KV_HEADS * SCALE_BYTES);
  }

  // Keys beyond the context may be NaN: zeros are read in their place.
  template <bool kWhole>
  __device__ void copy_rows(const unsigned char* low, const unsigned char* high, unsigned to) const {
    for (int value = 0; value < 2; ++value) {
      for (int i = 0; i < Item::kCount; ++i) {
        const Item item(i, lane);
        if (item.row >= kTile) continue;
        const int key = next + item.row;
        const int bytes = kWhole || (key >= first && key < end) ? 16 : 0;
        stream_async(to + (value ? kKeyBytes + item.row * kValuePitch : item.row * kKeyPitch) +
                           item.chunk * 16,
                       (item.row < 8 ? low : high) + value * kPlaneBytes +
                           item.row * kTokenBytes + item.chunk * 16,
                       bytes, policy);
      }
    }
  }
};

// Queries as plugins/kv_pool.py's `queries` makes them for packed keys, a head a warp: a lane has every 32nd
// element of it.
__device__ inline void turn_queries(const Bf16* rows, int num_heads, Bf16* to, int warp, int lane) {
  constexpr int kBlock = HEAD_DIM & -HEAD_DIM, kParts = (HEAD_DIM + 31) / 32;
  for (int head = warp; head < num_heads; head += WARPS) {
    float x[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      x[i] = __uint_as_float(static_cast<unsigned>(rows[head * HEAD_DIM + 32 * i + lane].bits) << 16);
    }
#pragma unroll
    for (int apart = kBlock / 64; apart > 0; apart /= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (i & apart) continue;
        const float one = x[i], other = x[i + apart];
        x[i] = one + other;
        x[i + apart] = one - other;
      }
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, x[i], apart);
        x[i] = lane & apart ? other - x[i] : x[i] + other;
      }
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const unsigned bits = pack_bf16(x[i] * (1.f / kBlock), 0.f);
      to[head * HEAD_DIM + 32 * i + lane].bits = static_cast<unsigned short>(bits);
    }
  }
}

// Two queries of a head as a pair.
__device__ inline unsigned pair_of(const Bf16* one, const Bf16* other) {
  return one->bits | static_cast<unsigned>(other->bits) << 16;
}

// Queries of 16 heads as the first product's left operand: q[step] for 16 elements of d.
struct Queries {
  unsigned q[HEAD_DIM / 16][4];

  __device__ Queries(const Bf16* rows, int num_heads, const Lane& lane) {
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      const int chunk = step / (kKeyElements / 4), part = step % (kKeyElements / 4);
      const int d = (lane.t + 4 * chunk) * kKeyElements + (kPacked ? part / 2 * 8 + part % 2 : 4 * part);
      for (int column = 0; column < 2; ++column) {
        const int head = lane.g + 8 * column;
        uint2 pair = {0, 0};
        if (head < num_heads) {
          const Bf16* const from = rows + head * HEAD_DIM + d;
          if constexpr (kPacked) {
            // A word has eight elements: the even ones are multiplied, then the odd ones.
            pair = {pair_of(from, from + 2), pair_of(from + 4, from + 6)};
          } else {
            pair = *reinterpret_cast<const uint2*>(from);
          }
        }
        q[step][column] = query_operand(pair.x);
        q[step][column + 2] = query_operand(pair.y);
      }
    }
  }
};

// Running softmax of one warp over its tiles.
struct Softmax {
  float largest[kColumns];  // of head g + 8 * column, the same in the four lanes of g
  float total[kColumns];    // of this lane's keys only
  float sums[kRowTiles][kColumns][4] = {};

  __device__ Softmax() {
    for (int column = 0; column < kColumns; ++column) {
      largest[column] = -infinity();
      total[column] = 0.f;
    }
  }

  // Scores of 16 keys become weights, in place; what was summed shrinks to the new largest score.
  __device__ void weigh(float (&scores)[2][4], const Lane& lane) {
    float shrink[kColumns];
    bool grows = false;
    for (int column = 0; column < kColumns; ++column) {
      float most = -infinity();
      for (int half = 0; half < 2; ++half) {
        most = fmaxf(most, fmaxf(scores[half][2 * column], scores[half][2 * column + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = fmaxf(most, largest[column]);
      grows |= most > largest[column];
      shrink[column] = exp2_approx(largest[column] - most);
      largest[column] = most;
      total[column] *= shrink[column];
      for (int half = 0; half < 2; ++half) {
        for (int i = 2 * column; i < 2 * column + 2; ++i) {
          scores[half][i] = exp2_approx(scores[half][i] - most);
          total[column] += scores[half][i];
        }
      }
    }
    if (!__any_sync(0xffffffffu, grows)) return;
    for (int column = 0; column < kColumns; ++column) {
      const float even = __shfl_sync(0xffffffffu, shrink[column], 8 * lane.t);
      const float odd = __shfl_sync(0xffffffffu, shrink[column], 8 * lane.t + 4);
      for (int tile = 0; tile < kRowTiles; ++tile) {
        sums[tile][column][0] *= even;
        sums[tile][column][1] *= odd;
        sums[tile][column][2] *= even;
        sums[tile][column][3] *= odd;
      }
    }
  }

  // Adds V^T . weights^T, from this lane's chunks of values 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ void add(const float (&weights)[2][4], const unsigned char* values, const Lane& lane) {
    unsigned high[kColumns][2], low[kColumns][2];
    for (int column = 0; column < kColumns; ++column) {
      for (int half = 0; half < 2; ++half) {
        const float a = weights[half][2 * column], b = weights[half][2 * column + 1];
        const unsigned pair = weight_operand<Operand>(a, b);
        high[column][half] = pair;
        // bf16 alone would round weights to 8 bits: what it drops is multiplied as well.
        low[column][half] = weight_operand<Operand>(a - __uint_as_float(pair << 16),
                                           b - __uint_as_float(pair & 0xffff0000u));
      }
    }
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      Words<kValueWords> rows[4];
      const int at = (lane.g + 8 * chunk) * kValueChunk;
      for (int row = 0; row < 4; ++row) {
        rows[row] = *reinterpret_cast<const Words<kValueWords>*>(
            values + (2 * lane.t + row % 2 + row / 2 * 8) * kValuePitch +
            (kValuesFit || at < kRowBytes ? at : 0));
      }
      for (int part = 0; part < kValueElements / 2; ++part) {
        unsigned pairs[4];
        transposed(rows, part, pairs);
        for (int column = 0; column < kColumns; ++column) {
          float(&to)[4] = sums[chunk * (kValueElements / 2) + part][column];
          multiply_16x8x16<Operand>(to, pairs, high[column][0], high[column][1]);
          if constexpr (!kE4m3) {
            multiply_16x8x16<Operand>(to, pairs, low[column][0], low[column][1]);
          }
        }
      }
    }
  }

  // Pairs of keys for elements 2 * part (pairs 0, 2) and 2 * part + 1 (pairs 1, 3) of a chunk.
  __device__ static void transposed(const Words<kValueWords> (&rows)[4], int part,
                                    unsigned (&pairs)[4]) {
    for (int half = 0; half < 2; ++half) {
      const Words<kValueWords>&even = rows[2 * half], &odd = rows[2 * half + 1];
      if constexpr (kPacked) {
        const unsigned both = __byte_perm(even.word[part / 4], odd.word[part / 4], 0x4040 + 0x1111 * (part % 4));
        const uint2 pair = code_operands((both & 0x0f0fu) | (both >> 4 & 0x0f0f0000u));
        pairs[2 * half] = pair.x;
        pairs[2 * half + 1] = pair.y;
      } else if constexpr (kBytes) {
        const uint2 pair = byte_operands(
            __byte_perm(even.word[part / 2], odd.word[part / 2], part % 2 ? 0x7362 : 0x5140));
        pairs[2 * half] = pair.x;
        pairs[2 * half + 1] = pair.y;
      } else {
        pairs[2 * half] = __byte_perm(even.word[part], odd.word[part], 0x5410);
        pairs[2 * half + 1] = __byte_perm(even.word[part], odd.word[part], 0x7632);
      }
    }
  }

  // Leaves the sums as [heads][HEAD_DIM] and adds up the totals.
  __device__ void store(float* to, const Lane& lane) {
    for (int column = 0; column < kColumns; ++column) {
      total[column] += __shfl_xor_sync(0xffffffffu, total[column], 1);
      total[column] += __shfl_xor_sync(0xffffffffu, total[column], 2);
      float* even = to + (8 * column + 2 * lane.t) * kSumsPitch;
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int chunk = 2 * tile / kValueElements;
        const int d = (lane.g + 8 * chunk) * kValueElements + 2 * tile % kValueElements;
        if (d >= HEAD_DIM) continue;
        const float(&sum)[4] = sums[tile][column];
        *reinterpret_cast<float2*>(even + d) = {sum[0], sum[2]};
        *reinterpret_cast<float2*>(even + kSumsPitch + d) = {sum[1], sum[3]};
      }
    }
  }
};

// The scale of a lane's i-th key, or value, of half a tile, from those of the tile.
__device__ inline float scale_at(const unsigned char* scales, int half, int i, const Lane& lane) {
  return reinterpret_cast<const float*>(scales)[8 * half + 2 * lane.t + i % 2];
}

// Scores of a tile's keys, in units of log2: [half][head g or g + 8, key 2t or 2t + 1].
__device__ inline void score_tile(const Queries& queries, const unsigned char* keys, float scale,
                                  const Lane& lane, float (&scores)[2][4]) {
  for (int half = 0; half < 2; ++half) {
    float sums[2][4] = {};  // two chains of products wait less for each other than one
    for (int chunk = 0; chunk < kKeyChunks; ++chunk) {
      const auto key = *reinterpret_cast<const Words<kKeyWords>*>(
          keys + (8 * half + lane.g) * kKeyPitch + (lane.t + 4 * chunk) * kKeyChunk);
      for (int part = 0; part < kKeyElements / 4; ++part) {
        const int step = chunk * (kKeyElements / 4) + part;
        if constexpr (kPacked) {
          const uint2 pair = code_operands(key.word[part / 2] >> 4 * (part % 2) & 0x0f0f0f0fu);
          multiply_16x8x16<Operand>(sums[step % 2], queries.q[step], pair.x, pair.y);
        } else if constexpr (kBytes) {
          const uint2 pair = byte_operands(key.word[part]);
          multiply_16x8x16<Operand>(sums[step % 2], queries.q[step], pair.x, pair.y);
        } else {
          multiply_16x8x16<Operand>(sums[step % 2], queries.q[step], key.word[2 * part],
                                    key.word[2 * part + 1]);
        }
      }
    }
    for (int i = 0; i < 4; ++i) {
      float product = sums[0][i] + sums[1][i];
      if constexpr (kScaled) product = __fmul_rn(product, scale_at(keys + kScalesAt, half, i, lane));
      scores[half][i] = score(product, scale);
    }
  }
}

}  // namespace trtc

using namespace trtc;

// Grid: (NUM_KV_HEADS * HEAD_TILES, sequences, splits).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
attention_split(const Bf16* q, const unsigned char* pool, const int* query_start,
                const int* context_lens, const int* page_table, K_SCALE_PARAMETER V_SCALE_PARAMETER
                PRE_SCALE_PARAMETER OUT_SCALE_PARAMETER SINKS_PARAMETER const int* dims, Out* out,
                float* partial, float2* stats) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float2(*const warp_stats)[8 * kColumns] =
      reinterpret_cast<float2(*)[8 * kColumns]>(shared_bytes + WARPS * kWarpBytes);
  let_next_kernel_start();

  // Step inputs, and keys of earlier steps, are older than the kernel before this one.
  const int sequence = blockIdx.y, split = blockIdx.z;
  bool idle = sequence >= dims[1];
  int row = 0, context = 1;
  if (!idle) {
    row = query_start[sequence];
    context = context_lens[sequence];
    idle = query_start[sequence + 1] - row != 1;
  }
  const Splits splits(context);
  if (idle || split >= splits.count) {
    wait_for_earlier_kernels();
    return;
  }
  const Lane lane;
  const int warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x / HEAD_TILES, first_head = blockIdx.x % HEAD_TILES * kHeads;
  const int num_heads = smaller(kHeads, kGroup - first_head);
  const int head = kv_head * kGroup + first_head;
  const int begin = splits.begin + split * splits.length;
  const int end = smaller(begin + splits.length, splits.end);

  unsigned char* const mine = shared_bytes + warp * kWarpBytes;
  const int first_tile = begin + warp * kTile;
  Fetcher fetcher{
      pool + kv_head * kRowBytes,
      pool + kCodeBytes + kv_head * SCALE_BYTES,
      page_table + static_cast<long long>(sequence) * TABLE_WIDTH,
      splits.first,
      splits.end,
      first_tile,
      end,
      shared_address(mine),
      evict_first(),
      lane.number,
  };
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) {
    // The last key is the new token's.
    if (fetcher.next + kTile >= splits.end) wait_for_earlier_kernels();
    fetcher.fetch();
  }
  wait_for_earlier_kernels();

  const Bf16* rows = q + static_cast<long long>(row) * Q_STRIDE + head * HEAD_DIM;
  if constexpr (kPacked) {
    Bf16* const turned = reinterpret_cast<Bf16*>(shared_bytes + WARPS * kWarpBytes + kStatsBytes);
    turn_queries(rows, num_heads, turned, warp, lane.number);
    __syncthreads();
    rows = turned;
  }
  const Queries queries(rows, num_heads, lane);
  const float scale = static_cast<float>(SCALE) * value_or_one(k_scale);
  Softmax softmax;
  int stage = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < end; tile += Fetcher::kStride) {
    wait_for_copies<STAGES - 1>();
    __syncwarp();
    const unsigned char* const keys = mine + stage * kStageBytes;
    float scores[2][4];
    score_tile(queries, keys, scale, lane, scores);
    if (tile < splits.first || tile + kTile > splits.end) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = tile + i / 4 * 8 + 2 * lane.t + i % 2;
        if (key < splits.first || key >= splits.end) scores[i / 4][i % 4] = -infinity();
      }
    }
    softmax.weigh(scores, lane);
    if constexpr (kScaled) {
      const unsigned char* const scales = keys + kScalesAt + kTile * SCALE_BYTES;
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] *= scale_at(scales, i / 4, i, lane);
    }
    softmax.add(scores, keys + kKeyBytes, lane);
    __syncwarp();
    fetcher.fetch();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  wait_for_copies<0>();
  __syncwarp();
  softmax.store(reinterpret_cast<float*>(mine), lane);
  if (lane.t == 0) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      warp_stats[warp][lane.g + 8 * column] = {softmax.largest[column], softmax.total[column]};
    }
  }
  __syncthreads();

  // A thread puts four elements of a head together, warp after warp.
  for (int item = threadIdx.x; item < num_heads * (HEAD_DIM / 4); item += 32 * WARPS) {
    const int column = item / (HEAD_DIM / 4), d = item % (HEAD_DIM / 4) * 4;
    // combine.cu adds the sink to what several splits leave behind.
    const float* const mine_alone = splits.count == 1 ? sinks : nullptr;
    const float sink = sink_of(mine_alone, head + column);
    float largest = sink, sum[4] = {};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) largest = fmaxf(largest, warp_stats[i][column].x);
    float total = mine_alone ? exp2_approx(sink - largest) : 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float share = exp2_approx(warp_stats[i][column].x - largest);
      const float4 theirs = *reinterpret_cast<const float4*>(
          reinterpret_cast<const float*>(shared_bytes + i * kWarpBytes) + column * kSumsPitch + d);
      total += share * warp_stats[i][column].y;
      sum[0] += share * theirs.x;
      sum[1] += share * theirs.y;
      sum[2] += share * theirs.z;
      sum[3] += share * theirs.w;
    }
    if (splits.count == 1) {
      const float by = value_or_one(v_scale) / total;
      const float result[4] = {sum[0] * by, sum[1] * by, sum[2] * by, sum[3] * by};
      Quantizer<Out>(pre_scale, out_scale)
          .store(out + static_cast<long long>(row) * OUT_STRIDE, (head + column) * HEAD_DIM + d, result);
    } else {
      const long long place =
          (static_cast<long long>(sequence) * MAX_SPLITS + split) * NUM_HEADS + head + column;
      *reinterpret_cast<float4*>(partial + place * HEAD_DIM + d) = {sum[0], sum[1], sum[2], sum[3]};
      if (d == 0) stats[place] = {largest, total};
    }
  }
}
