// What the products of experts with E2M1 weights on sm_90 have in common (e2m1_sm90.cu, e2m1_tiles_sm90.cu,
// e2m1_wide_sm90.cu).
//
// Weights are in groups of 32 with E8M0 scales (MXFP4, OCP Microscaling Formats 1.0). They are the first
// operand of WGMMA, from registers. Of many rows they become bf16 numbers, of fewer E4M3: E2M1 becomes E4M3 by
// the place of its bits, times 2^-6. x is the sum of two E4M3 numbers, times a power of two: what is a 512th of
// the largest magnitude or more is exact, and the rest loses less than a 2^17th of that. So products are as
// exact as those of bf16, and to unpack a weight takes half of the instructions.
#pragma once

#include "gpu/activation.cuh"
#include "gpu/hopper.cuh"
#include "gpu/rounding.cuh"

namespace trtc {

using u8 = unsigned char;

constexpr int kGroup = 32;         // channels that share a scale
constexpr int kChunkGroups = 8;    // of a row, in 128 bytes
constexpr int kChunkBytes = kChunkGroups * kGroup / 2;
constexpr int kCoreBytes = 128;    // of x: eight rows of 16 bytes, as WGMMA takes them

// Bytes of a row of scales: whole words.
__device__ constexpr int scale_stride(int groups) { return (groups + 3) / 4 * 4; }

// E4M3 codes of 2^-6 times the E2M1 numbers in the low halves of four bytes, or the high ones.
__device__ inline unsigned low_as_e4m3(unsigned word) {
  return (word << 4 & 0x80808080u) | (word << 2 & 0x1c1c1c1cu);
}
__device__ inline unsigned high_as_e4m3(unsigned word) {
  return (word & 0x80808080u) | (word >> 2 & 0x1c1c1c1cu);
}

// 2^(scale - 127) of the byte of that number.
__device__ inline float e8m0(uint2 scales, int number) {
  const unsigned word = number < 4 ? scales.x : scales.y;
  return __uint_as_float((word >> number % 4 * 8 & 255u) << 23);
}

// Powers of two for channels whose largest magnitude has the bits `most`.
struct ChannelScale {
  float up;    // brings the largest to 128 ... 256
  float down;  // 1 / up, times the 2^6 that weights lack; infinite or NaN where the largest is

  __device__ inline explicit ChannelScale(unsigned most) {
    // Tiny numbers lose bits, that `up` has an exponent.
    const unsigned exponent = max(most >> 23, 40u);
    up = __uint_as_float((127 + 134 - exponent) << 23);
    down = __uint_as_float(exponent == 255 ? 0x7f800000u : (exponent - 1) << 23);
  }
};

// The largest magnitude of eight bf16, as the bits of an f32; `most` if that is larger.
__device__ inline unsigned largest_bits(uint4 eight, unsigned most) {
  const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    most = max(most, max(words[i] << 16 & 0x7fffffffu, words[i] & 0x7fff0000u));
  }
  return most;
}

// The largest of a warp's.
__device__ inline unsigned largest_of_warp(unsigned most) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
  return most;
}

// Of eight bf16 times `up` the even ones, or the odd ones, as two E4M3 numbers each.
struct TwoParts {
  unsigned first, second;

  __device__ inline TwoParts(uint4 eight, int odd, float up) {
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = __uint_as_float(odd ? words[i] & 0xffff0000u : words[i] << 16) * up;
    }
    first = pack_e4m3(v[0], v[1], v[2], v[3]);
    const uint2 halves = e4m3_to_f16(first);
    second = pack_e4m3(v[0] - low_half(halves.x), v[1] - high_half(halves.x),
                       v[2] - low_half(halves.y), v[3] - high_half(halves.y));
  }

  static __device__ inline float low_half(unsigned pair) {
    return to_float(F16{static_cast<unsigned short>(pair)});
  }
  static __device__ inline float high_half(unsigned pair) {
    return to_float(F16{static_cast<unsigned short>(pair >> 16)});
  }
};

// ends[i] = the sum of value_of(0) ... value_of(i); returns the sum of all. By a whole warp.
template <int kCount, class ValueOf>
__device__ inline int add_up(int (&ends)[kCount], const ValueOf& value_of) {
  const int lane = threadIdx.x % 32;
  int end = 0;
  for (int first = 0; first < kCount; first += 32) {
    const int i = first + lane;
    int sum = i < kCount ? value_of(i) : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    if (i < kCount) ends[i] = end + sum;
    end += __shfl_sync(~0u, sum, 31);
  }
  return end;
}

// How many of the ends are not after `place`. By a whole warp.
template <int kCount>
__device__ inline int ends_up_to(const int (&ends)[kCount], int place) {
  const int lane = threadIdx.x % 32;
  int found = 0;
  for (int first = 0; first < kCount; first += 32) {
    const bool is_before = first + lane < kCount && ends[first + lane] <= place;
    found += __popc(__ballot_sync(~0u, is_before));
  }
  return found;
}

// Rows that the operand of e2m1_tiles_sm90.cu has of so many pairs: products are by 16 of them at least.
__device__ inline int operand_rows(int pairs) { return (pairs + 15) / 16 * 16; }

// Pairs of an expert, some of its members.
struct Block {
  int expert, first, found;
};

// Which blocks of kRows pairs the experts have, numbered expert after expert; in shared memory.
template <int kRows, int kExperts>
struct BlockList {
  int ends[kExperts];
  int num_blocks;

  // By the block's first warp.
  __device__ inline void fill(const int* counts) {
    if (threadIdx.x >= 32) return;
    const auto blocks_of = [&](int expert) { return (counts[expert] + kRows - 1) / kRows; };
    const int all = add_up(ends, blocks_of);
    if (threadIdx.x == 0) num_blocks = all;
  }

  // Of an expert: its first block.
  __device__ inline int begin(int expert) const { return expert > 0 ? ends[expert - 1] : 0; }

  // By a whole warp.
  __device__ inline Block find(const int* counts, int block) const {
    const int expert = ends_up_to(ends, block), first = (block - begin(expert)) * kRows;
    const int left = counts[expert] - first;
    return {expert, first, left < kRows ? left : kRows};
  }
};

// A gated linear unit as plugins/moe/reference.py rounds it.
struct Gate {
  bool is_gelu_tanh, is_quick_gelu;
  float limit, up_offset;  // limit 0: none

  // activation(gate) * (up + up_offset)
  __device__ inline float operator()(float gate, float up) const {
    gate = through_bf16(gate);
    up = through_bf16(up);
    if (limit > 0) {
      gate = fminf(gate, limit);
      up = fmaxf(fminf(up, limit), -limit);
    }
    const float power = is_quick_gelu  ? quick_gelu_power(gate)
                        : is_gelu_tanh ? gelu_power(gate)
                                       : silu_power(gate);
    return through_bf16(gate * reciprocal_approx(1.f + exp2_approx(power))) * (up + up_offset);
  }
};

}  // namespace trtc
