// Products of mixed_input.cu in int8, for so few rows of x that tensor cores have columns to spare.
//
// What takes time beside reading is to unpack nibbles, and as bytes they need the fewest
// instructions: a nibble becomes 16 times its value by its place alone. So a row of x becomes four
// columns of bytes. Of each 128 channels of it
//
//     x = f * (d0 + 2^8 d1 + 2^16 d2 + 2^24 d3)     -128 <= d < 128
//
// where the power of two f is such that the largest |x| has 30 bits: a bf16 that is a 2^22nd of it
// or more is exact, and what the others lose is less than a 2^30th of it. Sums of products are exact
// integers of 22 bits, which begin at the bits of 1.5 * 2^23 and so end as those of a float.
#pragma once

#include "gemm/mixed_input_tiles.cuh"

namespace trtc {

static_assert(kParts == 1 && !BYTES, "scales are of whole chunks");

constexpr int kDigits = 4;
constexpr int kColumns = ROWS * kDigits;
constexpr int kXTiles = (kColumns + 7) / 8;
constexpr int kXTileColumns = kColumns < 8 ? kColumns : 8;
constexpr int kXTileBytes = kXTileColumns * 4 * 16;  // of two eights of each lane
constexpr int kXPairBytes = kXTiles * kXTileBytes;
constexpr int kXChunkBytes = kLaneEights / 2 * kXPairBytes;
// Beside each chunk: the sums of its digits, of each column, and its rows' factors f.
constexpr int kFactorsAt = kXTiles * 8 * 4;
constexpr int kAsideBytes = kFactorsAt + kXTiles * 16;
constexpr int kAsideAt = kBlockChunks * kXChunkBytes;  // in the operand

constexpr int kWorth = 16;  // of a nibble's lowest bit
constexpr int kZeroBits = 0x4b400000;
constexpr float kZero = 12582912.f;

// The even nibbles of a word, or the odd ones, as bytes; unsigned ones with 8 taken off.
__device__ inline unsigned bytes_of(unsigned word, int odd) {
  return mask_and_flip(odd ? word : word << 4, 0xf0f0f0f0u, SIGNED ? 0u : 0x80808080u);
}

// Four numbers' digits: [i] has the i-th of each.
__device__ inline uint4 digits_of(const unsigned (&numbers)[4]) {
  const unsigned low[2] = {__byte_perm(numbers[0], numbers[1], 0x5140),
                           __byte_perm(numbers[2], numbers[3], 0x5140)};
  const unsigned high[2] = {__byte_perm(numbers[0], numbers[1], 0x7362),
                            __byte_perm(numbers[2], numbers[3], 0x7362)};
  return {__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632),
          __byte_perm(high[0], high[1], 0x5410), __byte_perm(high[0], high[1], 0x7632)};
}

// A run of eight channels of a row of x into the block's operand, in the order of the fragments; the
// 16 lanes that have a chunk follow each other.
__device__ inline void store_eight(u8* operand, int row, int run, uint4 values, bool is_row) {
  const unsigned pairs[4] = {values.x, values.y, values.z, values.w};
  unsigned bits[8], most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bits[i] = i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16;
    const unsigned size = bits[i] & 0x7fffffffu;
    most = size > most ? size : most;
  }
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, most, step);
    most = other > most ? other : most;
  }
  // |x| < 2^(exponent - 126); chunks of tiny numbers lose bits, that f has an exponent.
  const unsigned exponent = most >> 23 > 40 ? most >> 23 : 40;
  const float up = __uint_as_float((127 + 156 - exponent) << 23);
  unsigned numbers[2][4];  // of even channels and of odd ones
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned number = __float2int_rn(__uint_as_float(bits[i]) * up);
    // With a carry where a byte is 128 and more.
    numbers[i % 2][i / 2] = (number + 0x00808080u) ^ 0x00808080u;
  }
  const uint4 first = digits_of(numbers[0]), second = digits_of(numbers[1]);
  const unsigned digits[kDigits][2] = {
      {first.x, second.x}, {first.y, second.y}, {first.z, second.z}, {first.w, second.w}};
  const int chunk = run / 16, eight = run % kLaneEights, owner = run % 16 / kLaneEights;
  const unsigned to = shared_address(operand) + chunk * kXChunkBytes + eight / 2 * kXPairBytes +
                      owner * 16 + eight % 2 * 8;
  u8* const aside = operand + kAsideAt + chunk * kAsideBytes;
#pragma unroll
  for (int i = 0; i < kDigits; ++i) {
    const int column = row * kDigits + i;
    if (is_row) {
      store_shared(to + column / 8 * kXTileBytes + column % 8 * 64,
                   uint2{digits[i][0], digits[i][1]});
    }
    if (SIGNED) continue;
    int sum = sum_bytes(digits[i][0]) + sum_bytes(digits[i][1]);
#pragma unroll
    for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (is_row && run % 16 == 0) reinterpret_cast<int*>(aside)[column] = sum;
  }
  if (is_row && run % 16 == 0) {
    const float down = __uint_as_float((exponent + 127 - 156) << 23) * (1.f / kWorth);
    // Infinities and NaN make all of their chunk's products NaN.
    reinterpret_cast<float*>(aside + kFactorsAt)[row] =
        exponent == 255 ? __uint_as_float(0x7fffffffu) : down;
  }
}

// What a lane is: rows g and g + 8 of each tile of the weight, columns 2 t and 2 t + 1 of each of x.
struct Lane {
  int g, t;
  unsigned x_at;   // shared address of its words of x
  const u8* aside;
  float totals[ROW_TILES][kXTiles][4] = {};  // of columns: digits are put together at the end

  // `skipped`: chunks of the block before this warp's. Lanes whose column is not there multiply
  // another one, for nothing.
  __device__ inline Lane(const u8* operand, int skipped)
      : g(static_cast<int>(threadIdx.x) % 32 / 4),
        t(static_cast<int>(threadIdx.x) % 4),
        x_at(shared_address(operand) + skipped * kXChunkBytes + (g % kXTileColumns * 4 + t) * 16),
        aside(operand + kAsideAt + skipped * kAsideBytes) {}

  // totals += a chunk of weights . x
  __device__ inline void add_chunk(const u8* stage) {
    Words words;
    int sums[ROW_TILES][kXTiles][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        read_words(words[r][half], stage + r * kTileBytes, half * 8 + g, 0, t);
        begin_sums(sums[r], stage, r, half);
      }
    }
    multiply(sums, words);
    scale(sums, stage);
    x_at += kXChunkBytes;
    aside += kAsideBytes;
  }

  // Zero, less what bytes have too much: 8 - zero point, times the digits.
  __device__ inline void begin_sums(int (&sums)[kXTiles][4], const u8* stage, int r,
                                    int half) const {
    int over = 0;
    if (!SIGNED) over = 8;
    if (HAS_ZERO) over -= stage[kZerosAt + r * kZeroBytes + half * 8 + g];
#pragma unroll
    for (int i = 0; i < kXTiles; ++i) {
      int2 two = {0, 0};
      if (!SIGNED) two = *reinterpret_cast<const int2*>(aside + (i * 8 + 2 * t) * 4);
      sums[i][2 * half] = kZeroBits + kWorth * over * two.x;
      sums[i][2 * half + 1] = kZeroBits + kWorth * over * two.y;
    }
  }

  // sums += words . x
  __device__ inline void multiply(int (&sums)[ROW_TILES][kXTiles][4], const Words& words) const {
#pragma unroll
    for (int j = 0; j < kLaneEights; j += 2) {
      uint4 b[kXTiles];
#pragma unroll
      for (int i = 0; i < kXTiles; ++i) {
        b[i] = load_shared(x_at + j / 2 * kXPairBytes + i * kXTileBytes);
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          unsigned a[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) a[k] = bytes_of(words[r][k % 2][j + step], k / 2);
#pragma unroll
          for (int i = 0; i < kXTiles; ++i) {
            multiply_16x8x32(sums[r][i], a, step == 0 ? b[i].x : b[i].z,
                             step == 0 ? b[i].y : b[i].w);
          }
        }
      }
    }
  }

  // totals += sums times their rows' scales and f.
  __device__ inline void scale(const int (&sums)[ROW_TILES][kXTiles][4], const u8* stage) {
#pragma unroll
    for (int i = 0; i < kXTiles; ++i) {
      const int row = ROWS == 1 ? 0 : 2 * i + t / 2;
      const float factor = reinterpret_cast<const float*>(aside + kFactorsAt)[row];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        const float* scales = reinterpret_cast<const float*>(stage + kScalesAt + r * kScaleBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float by = scales[half * 8 + g] * factor;
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            totals[r][i][e] += (__int_as_float(sums[r][i][e]) - kZero) * by;
          }
        }
      }
    }
  }

  // Each row's four columns together.
  __device__ inline void store(float* parts) const {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int i = 0; i < kXTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float total = totals[r][i][2 * half] + 256.f * totals[r][i][2 * half + 1];
          total += 65536.f * __shfl_xor_sync(0xffffffffu, total, 1);
          const int row = 2 * i + t / 2;
          if (t % 2 == 0 && row < ROWS) {
            parts[row * kPartStride + kTileRows * r + g + half * 8] = total;
          }
        }
      }
    }
  }
};

}  // namespace trtc
