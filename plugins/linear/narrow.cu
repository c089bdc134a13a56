// out = softcap(x @ ((weight - zero) * weight_scale).T + bias) + residual for bf16 x, 4-bit weights
// in tiles (plugins/tiles.py) or row-major int8 ones, and so few rows of x that reading the weights
// takes all the time.
//
// A block takes 16 * ROW_TILES rows of the weight for each of its ROW_WARPS columns of warps, and K
// is split over the SPLITS warps of a column and over the blocks of a cluster. The parts of a sum
// are added up in the order of blocks and warps, so that a result depends neither on the other rows
// of x nor on their number. Each warp streams its tiles through a ring of its own in shared memory,
// begins before it waits for the kernels before this one, and meets the others only to add up.
//
// Weights are the first operand of the tensor cores. For each 128 channels lane (g, t) has a
// quarter of what is scaled alike, a part, of rows g and g + 8: runs of eight channels, a word of
// nibbles or two words of bytes each. A product may take the channels in any order, so nibbles i and
// i + 4 of a word, or bytes i and i + 2, make a pair of a fragment, and x, which the block keeps in
// shared memory, is put into that order when it is stored.
//
// A nibble n becomes a number by its bits alone: in the mantissa of a power of two it adds n times
// the worth of its lowest bit there, 0x4300 | n is the bf16 128 + n and 0x4180 | n << 3 is 16 + n.
// What the products have too much depends on x alone, and is where their sums begin: all products
// are exact, and scales multiply f32 sums. A byte is the difference of two such numbers, which is
// exact in bf16, so its products have nothing too much.
//
// Macros: N, K; BYTES (int8 weights, else nibbles); GROUP (channels that share a scale: 32, 64, or a multiple of 128), GROUPS; ROWS
// (of x at most: a power of two), ROW_TILES, ROW_WARPS, SPLITS, CLUSTER, STAGES, MIN_BLOCKS; X_STRIDE, OUT_STRIDE,
// RESIDUAL_STRIDE; OUT_TYPE, RESIDUAL_TYPE; SIGNED, HAS_ZERO, HAS_BIAS, HAS_RESIDUAL (0 or 1);
// SOFTCAP (0: none); COUNT (which of dims counts the rows).
#include "cuda/cluster.cuh"
#include "cuda/ptx.cuh"

namespace {

using namespace trtc;
using u8 = unsigned char;

constexpr int kTileRows = 16, kTileChannels = 128;
constexpr int kRowBytes = BYTES ? kTileChannels : kTileChannels / 2;
constexpr int kTileBytes = kTileRows * kRowBytes;

constexpr int kParts = GROUP < kTileChannels ? kTileChannels / GROUP : 1;
constexpr int kGroupTiles = GROUP < kTileChannels ? 1 : GROUP / kTileChannels;
constexpr int kEights = 16 / kParts;      // runs of eight channels of a part
constexpr int kLaneEights = kEights / 4;  // that a lane has of a row
constexpr int kEightWords = BYTES ? 2 : 1;
constexpr int kWords = kLaneEights * kEightWords;
constexpr int kChunks = K / kTileChannels;
constexpr int kSplitChunks = (kChunks + CLUSTER * SPLITS - 1) / (CLUSTER * SPLITS);
constexpr int kBlockChunks = kSplitChunks * SPLITS;
constexpr int kWarpRows = kTileRows * ROW_TILES;
constexpr int kBlockRows = kWarpRows * ROW_WARPS;
constexpr int kThreads = 32 * ROW_WARPS * SPLITS;
constexpr int kAhead = STAGES - 1;
static_assert(!BYTES || (SIGNED && !HAS_ZERO && kParts == 1), "int8 is signed, in large groups");
static_assert(N % kTileRows == 0 && K % kTileChannels == 0 && kBlockRows <= N, "tiles are whole");

constexpr int kScaleBytes = kTileRows * 4, kZeroBytes = kTileRows;  // of one group of a tile
constexpr int kScalesAt = ROW_TILES * kTileBytes;
constexpr int kZerosAt = kScalesAt + ROW_TILES * kParts * kScaleBytes;
constexpr int kStageBytes = kZerosAt + HAS_ZERO * ROW_TILES * kParts * kZeroBytes;
constexpr int kRingBytes = ROW_WARPS * SPLITS * STAGES * kStageBytes;

constexpr int kXTiles = (ROWS + 7) / 8;
constexpr int kXTileRows = ROWS < 8 ? ROWS : 8;
constexpr int kXTileBytes = kXTileRows * 4 * 16;  // of one eight of each lane
constexpr int kXEightBytes = kXTiles * kXTileBytes;
constexpr int kXChunkBytes = kParts * kLaneEights * kXEightBytes;
constexpr int kExcessBytes = kXTiles * 8 * 8;  // of a part: what its products have too much
constexpr int kExcessAt = kRingBytes + kBlockChunks * kXChunkBytes;

constexpr int kPartStride = kBlockRows + 4;  // f32 of a row of x; lanes write to different banks
constexpr int kPartFloats = ROWS * kPartStride;
constexpr int kLoads = 4;  // of x that a thread has in flight

// Of a lane, for its rows of the weight and of x.
using Words = unsigned[ROW_TILES][2][kWords];
using Sums = float[ROW_TILES][kXTiles][4];

// Pair i of a word, moved right by shift_of(i), begins at bit place_of(i) of a bf16's mantissa, and
// is added to base_of(i) there.
__device__ constexpr int place_of(int i) { return i == 0 ? 0 : 3; }
__device__ constexpr int shift_of(int i) { return i == 0 ? 0 : 4 * i - 3; }
__device__ constexpr unsigned base_of(int i) { return 128u >> place_of(i); }

// Pair i of a word of nibbles; signed ones with their sign bit flipped are 8 more.
__device__ inline unsigned nibbles_of(unsigned word, int i) {
  const int place = place_of(i);
  const unsigned exponent = 127 + 7 - place;
  const unsigned one = exponent << 7 | (SIGNED ? 8u << place : 0u);
  return mask_and_flip(word >> shift_of(i), 0x000f000fu << place, one * 0x00010001u);
}

// Pair i of a word of int8: 128 + the low seven bits, less 128, or 256 if the sign bit is set.
__device__ inline unsigned bytes_of(unsigned word, int i) {
  const unsigned bytes = word >> 8 * i;
  return subtract_bf16(mask_and_flip(bytes, 0x007f007fu, 0x43004300u),
                       mask_and_flip(bytes, 0x00800080u, 0x43004300u));
}

// Pair i of a lane's j-th eight.
__device__ inline unsigned pair_of(const unsigned (&words)[kWords], int j, int i) {
  return BYTES ? bytes_of(words[kEightWords * j + i / 2], i % 2) : nibbles_of(words[j], i);
}

// Lane t's words of a part of a row of a tile. The 16 bytes of rows of bytes are not in their order
// (see Stream): lanes that read together meet different banks.
__device__ inline void read_words(unsigned (&words)[kWords], const u8* tile, int row, int part,
                                  int t) {
  const u8* from = tile + row * kRowBytes + (part * 4 + t) * 4 * kWords;
  if constexpr (BYTES) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u8* chunk = tile + row * kRowBytes + ((2 * t + i) ^ row % 8) * 16;
      const uint4 four = *reinterpret_cast<const uint4*>(chunk);
      words[4 * i] = four.x, words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  } else if constexpr (kWords == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else if constexpr (kWords == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x, words[1] = two.y;
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  }
}

// Eight channels of x as pairs 0 ... 3, and their share of the excess: their sums times the bases
// of the nibbles, and times one.
struct Eight {
  uint4 pairs;
  float based, plain;
};

__device__ inline Eight eight_of(uint4 w) {
  // Channels i and i + 4 of the eight, or i and i + 2 of its halves.
  const unsigned second = BYTES ? w.y : w.z, third = BYTES ? w.z : w.y;
  const unsigned pairs[4] = {__byte_perm(w.x, second, 0x5410), __byte_perm(w.x, second, 0x7632),
                             __byte_perm(third, w.w, 0x5410), __byte_perm(third, w.w, 0x7632)};
  Eight eight{{pairs[0], pairs[1], pairs[2], pairs[3]}, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = __uint_as_float(pairs[i] << 16) + __uint_as_float(pairs[i] & 0xffff0000u);
    eight.based += static_cast<float>(base_of(i)) * sum;
    eight.plain += sum;
  }
  return eight;
}

// Some chunks of the rows of x, on their way to shared memory in the order of the fragments.
struct Operand {
  u8* shared;
  const Bf16* x;  // the first chunk of the first row
  int rows, row_eights;

  // All of the block take part.
  __device__ inline void store_all() const {
    const int lane = static_cast<int>(threadIdx.x) % 32, size = rows * row_eights;
    // Whole warps, for the shuffles.
    for (int first = threadIdx.x; first - lane < size; first += kLoads * kThreads) {
      uint4 eights[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int index = first + i * kThreads, row = index / row_eights;
        eights[i] = uint4{0, 0, 0, 0};
        if (index < size) {
          const Bf16* from = x + static_cast<long long>(row) * X_STRIDE + index % row_eights * 8;
          eights[i] = *reinterpret_cast<const uint4*>(from);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int index = first + i * kThreads;
        if (index - lane < size) store(index / row_eights, index % row_eights, eights[i]);
      }
    }
  }

  __device__ inline void store(int row, int run, uint4 values) const {
    const int part = run / kEights, owner = run % kEights / kLaneEights;
    Eight eight = eight_of(values);
    const int mine = part * kLaneEights + run % kLaneEights;
    const int at = mine * kXEightBytes + row / 8 * kXTileBytes;
    if (row < rows) {
      store_shared(shared_address(shared) + kRingBytes + at + (row % 8 * 4 + owner) * 16,
                   eight.pairs);
    }
    if (BYTES) return;
#pragma unroll
    for (int step = 1; step < kEights; step *= 2) {
      eight.based += __shfl_xor_sync(0xffffffffu, eight.based, step);
      eight.plain += __shfl_xor_sync(0xffffffffu, eight.plain, step);
    }
    if (row < rows && run % kEights == 0) {
      float2* excess = reinterpret_cast<float2*>(shared + kExcessAt + part * kExcessBytes);
      excess[row] = {eight.based, eight.plain};
    }
  }
};

// What a warp reads of the weights of its rows: tiles that follow each other in memory, or rows.
struct Stream {
  const u8 *weight, *scale, *zero;
  unsigned lane;
  unsigned long long policy;

  __device__ inline void copy(unsigned stage, int chunk) const {
    if (BYTES) return copy_rows(stage, chunk);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const u8* tile = weight + (static_cast<long long>(r) * kChunks + chunk) * kTileBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = half * 512 + lane * 16;
        stream_async(stage + r * kTileBytes + at, tile + at, 16, policy);
      }
      const int group = r * GROUPS + chunk / kGroupTiles * kParts;
      if (lane < kParts * kScaleBytes / 16) {
        stream_async(stage + kScalesAt + r * kParts * kScaleBytes + lane * 16,
                     scale + group * kScaleBytes + lane * 16, 16, policy);
      }
      if (HAS_ZERO && lane < kParts) {
        stream_async(stage + kZerosAt + (r * kParts + lane) * kZeroBytes,
                     zero + (group + lane) * kZeroBytes, 16, policy);
      }
    }
  }

  // Row-major bytes: eight lanes copy 128 channels of a row, sixteen a scale of each row.
  __device__ inline void copy_rows(unsigned stage, int chunk) const {
    const int sixteen = lane % 8;
#pragma unroll
    for (int at = lane / 8; at < kWarpRows; at += 4) {
      const u8* from = weight + static_cast<long long>(at) * K + chunk * kRowBytes + sixteen * 16;
      stream_async(stage + at * kRowBytes + (sixteen ^ at % 8) * 16, from, 16, policy);
    }
#pragma unroll
    for (int at = lane; at < kWarpRows; at += 32) {
      copy_async_4(stage + kScalesAt + at * 4, scale + (at * GROUPS + chunk / kGroupTiles) * 4);
    }
  }
};

// What a lane is: rows g and g + 8 of each tile of the weight, rows 2 t and 2 t + 1 of each of x.
struct Lane {
  int g, t;
  unsigned x_at;        // shared address of its words of x
  const u8* excess_at;  // of its rows of x

  // A part's words of weights, and its sums as they begin.
  __device__ inline void begin_part(Words& words, Sums& sums, const u8* stage, int part) const {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + g;
        read_words(words[r][half], stage + r * kTileBytes, row, part, t);
        float over = SIGNED ? 8.f : 0.f;
        if (HAS_ZERO) over = stage[kZerosAt + (r * kParts + part) * kZeroBytes + row];
#pragma unroll
        for (int i = 0; i < kXTiles; ++i) {
          float4 two = {};
          if (!BYTES) two = *reinterpret_cast<const float4*>(excess_at + i * 64);
          sums[r][i][2 * half] = -two.x - over * two.y;
          sums[r][i][2 * half + 1] = -two.z - over * two.w;
        }
      }
    }
  }

  // sums += words . x
  __device__ inline void multiply(Sums& sums, const Words& words) {
#pragma unroll
    for (int j = 0; j < kLaneEights; ++j, x_at += kXEightBytes) {
      uint4 b[kXTiles];
#pragma unroll
      for (int i = 0; i < kXTiles; ++i) b[i] = load_shared(x_at + i * kXTileBytes);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          unsigned a[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) a[k] = pair_of(words[r][k % 2], j, 2 * step + k / 2);
#pragma unroll
          for (int i = 0; i < kXTiles; ++i) {
            multiply_16x8x16<Bf16>(sums[r][i], a, step == 0 ? b[i].x : b[i].z,
                                   step == 0 ? b[i].y : b[i].w);
          }
        }
      }
    }
    excess_at += kExcessBytes;
  }

  // totals += sums times the scales of a part.
  __device__ inline void scale_part(Sums& totals, const Sums& sums, const u8* stage,
                                    int part) const {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const u8* at = stage + kScalesAt + (r * kParts + part) * kScaleBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = reinterpret_cast<const float*>(at)[half * 8 + g];
#pragma unroll
        for (int i = 0; i < kXTiles; ++i) {
          totals[r][i][2 * half] += sums[r][i][2 * half] * scale;
          totals[r][i][2 * half + 1] += sums[r][i][2 * half + 1] * scale;
        }
      }
    }
  }

  __device__ inline void store(float* parts, const Sums& totals) const {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < kXTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 8 * i + 2 * t + e % 2;
          float* const to = parts + row * kPartStride + kTileRows * r + g + e / 2 * 8;
          if (ROWS >= 8 || row < ROWS) *to = totals[r][i][e];
        }
      }
    }
  }
};

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(Bf16 x) { return to_float(x); }

__device__ inline void meet_cluster() {
#if CLUSTER > 1
  arrive_at_cluster();
  wait_for_cluster();
#else
  __syncthreads();
#endif
}

// A sum's parts, those of each block's warps in their order.
__device__ inline float add_parts(const float* place) {
  float total = 0.f;
#pragma unroll
  for (int from = 0; from < CLUSTER; ++from) {
#pragma unroll
    for (int i = 0; i < SPLITS; ++i) {
      const float* part = place + i * kPartFloats;
#if CLUSTER > 1
      total += load_from_block(address_in_block(shared_address(part), from));
#else
      total += *part;
#endif
    }
  }
  return total;
}

}  // namespace

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(kThreads, MIN_BLOCKS) narrow_linear(
    const Bf16* __restrict__ x, const u8* __restrict__ weight, const u8* __restrict__ weight_scale,
#if HAS_ZERO
    const u8* __restrict__ weight_zero,
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
  extern __shared__ __align__(128) u8 shared_bytes[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if CLUSTER > 1
  const int rank = rank_in_cluster();
#else
  const int rank = 0;
#endif
  // The last block begins early enough to be whole: rows of two blocks get the same result twice.
  const int block = blockIdx.x / CLUSTER;
  const int first_n = (block + 1) * kBlockRows <= N ? block * kBlockRows : N - kBlockRows;
  const int first_row = warp % ROW_WARPS * kWarpRows;
  const int first_chunk = rank * kBlockChunks;
  const int begin = first_chunk + warp / ROW_WARPS * kSplitChunks;
  const int end = begin + kSplitChunks < kChunks ? begin + kSplitChunks : kChunks;
  const unsigned shared = shared_address(shared_bytes);
  const unsigned ring = shared + warp * STAGES * kStageBytes;
  const long long tile = (first_n + first_row) / kTileRows;
  const Stream stream{weight + tile * kChunks * kTileBytes,
                      weight_scale + tile * GROUPS * kScaleBytes,
                      weight_zero + (HAS_ZERO ? tile * GROUPS * kZeroBytes : 0),
                      static_cast<unsigned>(lane), evict_first()};
  const int rows = dims[COUNT] < ROWS ? dims[COUNT] : ROWS;
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) {
    if (begin + stage < end) stream.copy(ring + stage * kStageBytes, begin + stage);
    commit_copies();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int left = kChunks - first_chunk;
  const int num_chunks = CLUSTER == 1 ? kChunks : left < kBlockChunks ? left : kBlockChunks;
  // The last blocks of a cluster may have none.
  const Operand operand{shared_bytes, x + first_chunk * kTileChannels,
                        CLUSTER == 1 || left > 0 ? rows : 0, num_chunks * 16};
  operand.store_all();
  __syncthreads();

  const int skipped = begin - first_chunk, g = lane / 4, t = lane % 4;
  // Lanes whose row of x is not there multiply another one, for nothing.
  Lane mine{g, t,
            shared + kRingBytes + skipped * kXChunkBytes + (g % kXTileRows * 4 + t) * 16,
            shared_bytes + kExcessAt + skipped * kParts * kExcessBytes + t * 16};
  Sums totals = {};
  int stage = 0;
  for (int chunk = begin; chunk < end; ++chunk) {
    // All lanes have read what the stage before this one held: it takes another chunk.
    __syncwarp();
    const int free = stage == 0 ? STAGES - 1 : stage - 1;
    if (chunk + kAhead < end) stream.copy(ring + free * kStageBytes, chunk + kAhead);
    commit_copies();
    wait_for_copies<kAhead>();
    __syncwarp();
    const u8* at = shared_bytes + (warp * STAGES + stage) * kStageBytes;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Words words;
      Sums sums;
      mine.begin_part(words, sums, at, part);
      mine.multiply(sums, words);
      mine.scale_part(totals, sums, at, part);
    }
  }

  // All have read x and their stages for the last time: their memory takes the parts of the sums.
  float* parts = reinterpret_cast<float*>(shared_bytes);
  __syncthreads();
  mine.store(parts + warp / ROW_WARPS * kPartFloats + first_row, totals);
  meet_cluster();
  const int step = CLUSTER * kThreads;
  for (int index = rank * kThreads + threadIdx.x; index < rows * kBlockRows; index += step) {
    const int row = index / kBlockRows, column = index % kBlockRows, n = first_n + column;
    float total = add_parts(parts + row * kPartStride + column);
#if HAS_BIAS
    total += bias[n];
#endif
    const float softcap = SOFTCAP;
    if (softcap != 0) total = softcap * tanhf(total / softcap);
#if HAS_RESIDUAL
    total += value_of(residual[static_cast<long long>(row) * RESIDUAL_STRIDE + n]);
#endif
    out[static_cast<long long>(row) * OUT_STRIDE + n] = round_to<OUT_TYPE>(total);
  }
#if CLUSTER > 1
  meet_cluster();  // The others may still read this block's parts.
#endif
}
