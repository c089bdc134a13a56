// Weights of mixed_input.cu on their way to a warp: 4-bit ones in tiles (plugins/tiles.py), int8 ones
// and those of 6 bits (plugins/six_bits.py) in rows. A chunk is 128 channels of 16 * ROW_TILES rows, with its scales and zero points a stage of
// the warp's ring.
#pragma once

#include "gemm/codebook.cuh"
#include "gpu/ptx.cuh"
#include "gpu/rounding.cuh"

namespace trtc {

using u8 = unsigned char;

constexpr int kThreads = 32 * ROW_WARPS * SPLITS;
constexpr int kTileRows = 16, kTileChannels = 128;
constexpr int kRowBytes = BYTES ? kTileChannels : SIX_BITS ? kTileChannels * 6 / 8 : kTileChannels / 2;
constexpr int kTileBytes = kTileRows * kRowBytes;

constexpr int kParts = GROUP < kTileChannels ? kTileChannels / GROUP : 1;
constexpr int kGroupTiles = GROUP < kTileChannels ? 1 : GROUP / kTileChannels;
constexpr int kEights = 16 / kParts;      // runs of eight channels of a part
constexpr int kLaneEights = kEights / 4;  // that a lane has of a row
constexpr int kEightWords = BYTES ? 2 : 1;
constexpr int kPlanes = 3, kPlaneBytes = kTileChannels / 4;  // of a row of six bits
constexpr int kWords = SIX_BITS ? 2 * kPlanes : kLaneEights * kEightWords;
constexpr int kChunks = K / kTileChannels;
constexpr int kSplitChunks = (kChunks + CLUSTER * SPLITS - 1) / (CLUSTER * SPLITS);
constexpr int kBlockChunks = kSplitChunks * SPLITS;
constexpr int kWarpRows = kTileRows * ROW_TILES;
constexpr int kBlockRows = kWarpRows * ROW_WARPS;
static_assert(!CODEBOOK || (!SIGNED && !BYTES && !HAS_ZERO), "codes are unsigned nibbles");
static_assert(!BYTES || (SIGNED && !HAS_ZERO && kParts == 1), "int8 is signed, in large groups");
static_assert(!SIX_BITS || (!CODEBOOK && !SIGNED && !BYTES && !HAS_ZERO && kParts == 1), "six bits are in large groups");
static_assert(N % kTileRows == 0 && K % kTileChannels == 0 && kBlockRows <= N, "tiles are whole");

// Of out, all and those of a block: with a gate half of a block's rows are gate's, and the others are
// up's of the same columns, which lie that many rows after where they would without.
constexpr int kOutColumns = GATE ? N / 2 : N;
constexpr int kBlockOut = GATE ? kBlockRows / 2 : kBlockRows;
constexpr int kUpAfter = kOutColumns - kBlockOut;
static_assert(!GATE || (ROW_WARPS % 2 == 0 && kOutColumns % kTileRows == 0), "a warp has either");

constexpr int kScaleBytes = kTileRows * (CODEBOOK ? 1 : 4), kZeroBytes = kTileRows;  // of one group of a tile
constexpr int kScalesAt = ROW_TILES * kTileBytes;
constexpr int kZerosAt = kScalesAt + ROW_TILES * kParts * kScaleBytes;
constexpr int kStageBytes = kZerosAt + HAS_ZERO * ROW_TILES * kParts * kZeroBytes;
// Shared memory: sums of the warps, rings, x.
constexpr int kRingAt = HAS_NORM ? 32 * 4 : 0;
constexpr int kOperandAt = kRingAt + ROW_WARPS * SPLITS * STAGES * kStageBytes;

constexpr int kPartStride = kBlockRows + 4;  // f32 of a row of x; lanes write to different banks

// The scale of a row of a tile, from those of a group.
__device__ inline float scale_at(const u8* scales, int row) {
  if (CODEBOOK) return __uint_as_float(code_scale_bits(scales[row]));
  return reinterpret_cast<const float*>(scales)[row];
}

// Of a lane, for its rows of the weight.
using Words = unsigned[ROW_TILES][2][kWords];

// Lane t's words of a part of a row of a tile. The 16 bytes of rows of bytes are not in their order
// (see Stream): lanes that read together meet different banks.
__device__ inline void read_words(unsigned (&words)[kWords], const u8* tile, int row, int part,
                                  int t) {
  const u8* from = tile + row * kRowBytes + (part * 4 + t) * 4 * kWords;
  if constexpr (SIX_BITS) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint2 two = *reinterpret_cast<const uint2*>(tile + row * kRowBytes + plane * kPlaneBytes + t * 8);
      words[2 * plane] = two.x, words[2 * plane + 1] = two.y;
    }
  } else if constexpr (BYTES) {
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

// What a warp reads of the weights of its rows: tiles that follow each other in memory, or rows.
struct Stream {
  const u8 *weight, *scale, *zero;
  unsigned lane;
  unsigned long long policy;

  __device__ inline void copy(unsigned stage, int chunk) const {
    if (BYTES || SIX_BITS) return copy_rows(stage, chunk);
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

  // Rows that lie after one another: eight lanes copy 128 channels of bytes of a row, six those of six
  // bits, which meet different banks as they lie. Sixteen copy a scale of each row.
  __device__ inline void copy_rows(unsigned stage, int chunk) const {
    if constexpr (SIX_BITS) {
      constexpr int kPieces = kRowBytes / 16;
#pragma unroll
      for (int i = 0; i < kWarpRows * kPieces / 32; ++i) {
        const int at = (i * 32 + lane) / kPieces, sixteen = (i * 32 + lane) % kPieces;
        const u8* from = weight + (static_cast<long long>(at) * kChunks + chunk) * kRowBytes + sixteen * 16;
        stream_async(stage + at * kRowBytes + sixteen * 16, from, 16, policy);
      }
    } else {
      const int sixteen = lane % 8;
#pragma unroll
      for (int at = lane / 8; at < kWarpRows; at += 4) {
        const u8* from = weight + static_cast<long long>(at) * K + chunk * kRowBytes + sixteen * 16;
        stream_async(stage + at * kRowBytes + (sixteen ^ at % 8) * 16, from, 16, policy);
      }
    }
#pragma unroll
    for (int at = lane; at < kWarpRows; at += 32) {
      copy_async_4(stage + kScalesAt + at * 4, scale + (at * GROUPS + chunk / kGroupTiles) * 4);
    }
  }
};

}  // namespace trtc
