// Products of mixed_input.cu in bf16, for any number of rows.
//
// A product may take the channels in any order, so nibbles i and i + 4 of a word, or bytes i and
// i + 2, make a pair of a fragment, and x is put into that order when it is stored.
//
// A nibble n becomes a number by its bits alone: in the mantissa of a power of two it adds n times
// the worth of its lowest bit there, 0x4300 | n is the bf16 128 + n and 0x4180 | n << 3 is 16 + n.
// What the products have too much depends on x alone, and is where their sums begin: all products
// are exact, and scales multiply f32 sums. A byte is the difference of two such numbers, which is
// exact in bf16, so its products have nothing too much.
//
// Codes of a codebook become 128 + n by a table (codebook.cuh). Their pairs are of channels that follow each other.
// Codes of 6 bits are joined of their planes (plugins/six_bits.py) and become 128 + n as nibbles do, in
// pairs of channels i and i + 4.
#pragma once

#include "gemm/codebook.cuh"
#include "gemm/mixed_input_tiles.cuh"

namespace trtc {

constexpr int kXTiles = (ROWS + 7) / 8;
constexpr int kXTileRows = ROWS < 8 ? ROWS : 8;
constexpr int kXTileBytes = kXTileRows * 4 * 16;  // of one eight of each lane
constexpr int kXEightBytes = kXTiles * kXTileBytes;
constexpr int kXChunkBytes = kParts * kLaneEights * kXEightBytes;
constexpr int kExcessBytes = kXTiles * 8 * 8;  // of a part: what its products have too much
constexpr int kExcessAt = kBlockChunks * kXChunkBytes;  // in the operand

// Of a lane, for its rows of the weight and of x.
using Sums = float[ROW_TILES][kXTiles][4];

// Pair i of a word, moved right by shift_of(i), begins at bit place_of(i) of a bf16's mantissa, and
// is added to base_of(i) there.
__device__ constexpr int place_of(int i) { return i == 0 ? 0 : 3; }
__device__ constexpr int shift_of(int i) { return i == 0 ? 0 : 4 * i - 3; }
__device__ constexpr unsigned base_of(int i) { return CODEBOOK ? kCodesAbove : SIX_BITS ? 128u : 128u >> place_of(i); }

// What codes are more than the weights.
constexpr float kCodesOver = SIX_BITS ? 32.f : SIGNED ? 8.f : 0.f;

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

// Codes of 6 bits as bytes: of channels i, i + 4, i + 8 and i + 12 of a lane's first 16 or its others.
__device__ inline unsigned six_bits_of(const unsigned (&words)[kWords], int which, int i) {
  const unsigned low = words[i / 2 * 2 + which] >> i % 2 * 4, pairs = words[kWords - 2 + which];
  const unsigned high = i < 2 ? pairs << (4 - 2 * i) : pairs >> (2 * i - 4);
  return (low & 0x0f0f0f0fu) | (high & 0x30303030u);
}

// Pair i of a lane's j-th eight.
__device__ inline unsigned pair_of(const unsigned (&words)[kWords], int j, int i) {
  if (SIX_BITS) return __byte_perm(six_bits_of(words, j / 2, i), 0x43434343u, j % 2 == 0 ? 0x4140 : 0x4342);
  if (CODEBOOK) return pair_of_bytes(bytes_of_codes(words[j] >> i / 2 * 16), i % 2);
  return BYTES ? bytes_of(words[kEightWords * j + i / 2], i % 2) : nibbles_of(words[j], i);
}

// Eight channels of x as pairs 0 ... 3, and their share of the excess: their sums times the bases
// of the nibbles, and times one.
struct Eight {
  uint4 pairs;
  float based, plain;
};

__device__ inline Eight eight_of(uint4 w) {
  // Channels i and i + 4 of the eight, or i and i + 2 of its halves, or 2i and 2i + 1.
  const unsigned second = BYTES ? w.y : w.z, third = BYTES ? w.z : w.y;
  unsigned pairs[4] = {__byte_perm(w.x, second, 0x5410), __byte_perm(w.x, second, 0x7632),
                       __byte_perm(third, w.w, 0x5410), __byte_perm(third, w.w, 0x7632)};
  if (CODEBOOK) pairs[0] = w.x, pairs[1] = w.y, pairs[2] = w.z, pairs[3] = w.w;
  Eight eight{{pairs[0], pairs[1], pairs[2], pairs[3]}, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = __uint_as_float(pairs[i] << 16) + __uint_as_float(pairs[i] & 0xffff0000u);
    eight.based += static_cast<float>(base_of(i)) * sum;
    eight.plain += sum;
  }
  return eight;
}

// A run of eight channels of a row of x into the block's operand, in the order of the fragments; the
// lanes of a warp have runs that follow each other.
__device__ inline void store_eight(u8* operand, int row, int run, uint4 values, bool is_row) {
  const int part = run / kEights, owner = run % kEights / kLaneEights;
  Eight eight = eight_of(values);
  const int mine = part * kLaneEights + run % kLaneEights;
  const int at = mine * kXEightBytes + row / 8 * kXTileBytes + (row % 8 * 4 + owner) * 16;
  if (is_row) store_shared(shared_address(operand) + at, eight.pairs);
  if (BYTES) return;
#pragma unroll
  for (int step = 1; step < kEights; step *= 2) {
    eight.based += __shfl_xor_sync(0xffffffffu, eight.based, step);
    eight.plain += __shfl_xor_sync(0xffffffffu, eight.plain, step);
  }
  if (is_row && run % kEights == 0) {
    float2* excess = reinterpret_cast<float2*>(operand + kExcessAt + part * kExcessBytes);
    excess[row] = {eight.based, eight.plain};
  }
}

// What a lane is: rows g and g + 8 of each tile of the weight, rows 2 t and 2 t + 1 of each of x.
struct Lane {
  int g, t;
  unsigned x_at;        // shared address of its words of x
  const u8* excess_at;  // of its rows of x
  Sums totals = {};

  // `skipped`: chunks of the block before this warp's. Lanes whose row of x is not there multiply
  // another one, for nothing.
  __device__ inline Lane(const u8* operand, int skipped)
      : g(static_cast<int>(threadIdx.x) % 32 / 4),
        t(static_cast<int>(threadIdx.x) % 4),
        x_at(shared_address(operand) + skipped * kXChunkBytes + (g % kXTileRows * 4 + t) * 16),
        excess_at(operand + kExcessAt + skipped * kParts * kExcessBytes + t * 16) {}

  // totals += a chunk of weights . x
  __device__ inline void add_chunk(const u8* stage) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Words words;
      Sums sums;
      begin_part(words, sums, stage, part);
      multiply(sums, words);
      scale_part(sums, stage, part);
    }
  }

  // A part's words of weights, and its sums as they begin.
  __device__ inline void begin_part(Words& words, Sums& sums, const u8* stage, int part) const {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = half * 8 + g;
        read_words(words[r][half], stage + r * kTileBytes, row, part, t);
        float over = kCodesOver;
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
  __device__ inline void scale_part(const Sums& sums, const u8* stage, int part) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const u8* at = stage + kScalesAt + (r * kParts + part) * kScaleBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scale_at(at, half * 8 + g);
#pragma unroll
        for (int i = 0; i < kXTiles; ++i) {
          totals[r][i][2 * half] += sums[r][i][2 * half] * scale;
          totals[r][i][2 * half + 1] += sums[r][i][2 * half + 1] * scale;
        }
      }
    }
  }

  __device__ inline void store(float* parts) const {
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

}  // namespace trtc
