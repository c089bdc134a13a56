// Integer weights in shared memory as the first operand of WGMMA: bf16 numbers in the
// order of its fragments, for x in its own order.
//
// A nibble or the low seven bits of a byte become a number by their place alone: in the mantissa of
// 128 they add themselves to it. 128, zero points and the worth of a sign bit are subtracted again,
// which is exact in bf16. So is the product with a power of two: of a scale its power goes into the
// weights, and the rest of it, from 1 to 2, is what a sum of such products is a multiple of. Codes of a
// codebook become 128 + n by a table (codebook.cuh), four at a time.
#pragma once

#include "gemm/codebook.cuh"
#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"

namespace trtc {

using u8 = unsigned char;

constexpr int kWarpRows = 16, kChunkChannels = 128;
constexpr int kRowBytes = BYTES ? kChunkChannels : kChunkChannels / 2;
constexpr int kTileBytes = kWarpRows * kRowBytes;
constexpr int kParts = GROUP < kChunkChannels ? kChunkChannels / GROUP : 1;
constexpr int kGroupChunks = GROUP < kChunkChannels ? 1 : GROUP / kChunkChannels;
constexpr int kChunks = K / kChunkChannels;
constexpr int kScaleBytes = kWarpRows * (CODEBOOK ? 1 : 4), kZeroBytes = kWarpRows;  // of one group of a tile
constexpr int kZerosAt = kTileBytes + kParts * kScaleBytes;
constexpr int kWarpBytes = kZerosAt + HAS_ZERO * kParts * kZeroBytes;  // of a stage
static_assert(!BYTES || (SIGNED && !HAS_ZERO && kParts == 1), "int8 is signed, in large groups");
static_assert(N % kWarpRows == 0 && K % kChunkChannels == 0, "tiles are whole");

// Offset of a 16-byte vector of a row of a tile, swizzled: lanes that read together use different banks.
__device__ inline unsigned piece_offset(int row, int piece) {
  return row * kRowBytes + (piece ^ (BYTES ? row % 8 : row / 2 % 4)) * 16;
}

// What a row's weights are made with.
struct RowScale {
  float rest;              // of the scale, beside its power of two
  unsigned power, offset;  // pairs of bf16: (128 + n) * power + offset

  __device__ inline RowScale(const u8* tile, int row, int part) {
    const u8* scales = tile + kTileBytes + part * kScaleBytes;
    const unsigned bits = CODEBOOK ? code_scale_bits(scales[row])
                              : reinterpret_cast<const unsigned*>(scales)[row];
    rest = __uint_as_float((bits & 0x807fffffu) | 0x3f800000u);
    power = (bits >> 16 & 0x7f80u) * 0x10001u;
    unsigned over = CODEBOOK ? 0xc300u - kLeastCode : SIGNED ? 0xc308u : 0xc300u;  // -(128 - least), -136, -128
    if (HAS_ZERO) over |= tile[kZerosAt + part * kZeroBytes + row];
    offset = multiply_add_bf16(over * 0x10001u, power, 0);
  }
};

// Two weights of a row times its power, from the two bytes that the selector names, or the byte.
__device__ inline unsigned weights_of(uint2 words, unsigned selector, const RowScale& scale) {
  if (BYTES) {
    const unsigned bytes = __byte_perm(words.x, words.y, selector);
    const unsigned low = mask_and_flip(bytes, 0x007f007fu, 0x43004300u);
    const unsigned sign = mask_and_flip(bytes, 0x00800080u, 0x43004300u);
    return multiply_add_bf16(subtract_bf16(low, sign), scale.power, 0);
  }
  // The low nibble's pair is the high one, which comes to lie 16 bits above it.
  const unsigned both = __byte_perm(words.x, 0, selector) * 0x1001u;
  const unsigned one = SIGNED ? 0x43084308u : 0x43004300u;
  return multiply_add_bf16(mask_and_flip(both, 0x000f000fu, one), scale.power, scale.offset);
}

// Two weights of a row times its power, the first two of four or the others.
__device__ inline unsigned weights_of_codes(unsigned bytes, int which, const RowScale& scale) {
  return multiply_add_bf16(pair_of_bytes(bytes, which), scale.power, scale.offset);
}

// Of lane 4g + t: the bytes of channels 2t and 2t + 1 of eight; of codes of a codebook, of two words.
__device__ inline unsigned selector_of(int t) {
  if (CODEBOOK) return t | (4 + t) << 4;
  return BYTES ? 2 * t | (2 * t + 1) << 8 : 0x4440 | t;
}

// Fragments of rows g and g + 8 of a tile, for two products of 16 channels each: the `two`-th of 32.
__device__ inline void load_fragments(unsigned (&a)[2][4], unsigned tile, int g, int two,
                                      unsigned selector, const RowScale (&scales)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 words[2];
    if (CODEBOOK) {
      const uint4 four = load_shared(tile + piece_offset(half * 8 + g, two));
      // This lane's byte of each word, and so the codes of two products.
      const unsigned low = __byte_perm(four.x, four.y, selector);
      const unsigned high = __byte_perm(four.z, four.w, selector);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const unsigned bytes = bytes_of_codes(step == 0 ? low : high);
        a[step][half] = weights_of_codes(bytes, 0, scales[half]);
        a[step][2 + half] = weights_of_codes(bytes, 1, scales[half]);
      }
      continue;
    }
    if (BYTES) {
      words[0] = load_shared(tile + piece_offset(half * 8 + g, 2 * two));
      words[1] = load_shared(tile + piece_offset(half * 8 + g, 2 * two + 1));
    } else {
      const uint4 four = load_shared(tile + piece_offset(half * 8 + g, two));
      words[0] = {four.x, 0, four.y, 0};
      words[1] = {four.z, 0, four.w, 0};
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint4 of = words[step];
      a[step][half] = weights_of({of.x, of.y}, selector, scales[half]);
      a[step][2 + half] = weights_of({of.z, of.w}, selector, scales[half]);
    }
  }
}

}  // namespace trtc
