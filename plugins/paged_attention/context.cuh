// What the kernels of paged_attention agree on: shapes, and how a context falls into splits.
//
// Macros: those of attention/scores.cuh, and HEAD_DIM; POOL (Bf16, E4m3, I8 or U4x2) SCALE_BYTES (of a head's own scale
// in the pool: 4 of the latter two, else 0) OUT; PAGE_SIZE TABLE_WIDTH;
// Q_STRIDE OUT_STRIDE; SCALE; SPLIT_KEYS MAX_SPLITS; HAS_K_SCALE
// HAS_V_SCALE HAS_PRE_SCALE HAS_OUT_SCALE HAS_SINKS.
#pragma once

#include "attention/scores.cuh"

namespace trtc {

using Pool = POOL;
using Out = OUT;

template <class T>
constexpr int kBitsOf = 8 * sizeof(T);
template <>
constexpr int kBitsOf<U4x2> = 4;
constexpr int kBits = kBitsOf<Pool>;                           // of an element of a key or value
constexpr int kRowBytes = HEAD_DIM * kBits / 8;                // a key or value of one head
constexpr int kTokenBytes = NUM_KV_HEADS * kRowBytes;          // of all heads
constexpr int kCodeBytes = PAGE_SIZE * kTokenBytes;            // the keys, or values, of a page
constexpr bool kScaled = SCALE_BYTES > 0;                      // their f32 scales are behind them
constexpr int kPlaneBytes = kCodeBytes + PAGE_SIZE * NUM_KV_HEADS * SCALE_BYTES;
constexpr long long kPageBytes = 2ll * kPlaneBytes;
constexpr int kTile = 16;  // keys of one product; where a window begins is rounded down to it

static_assert(HEAD_DIM % 16 == 0, "rows of K and V are taken 16 elements at a time");
static_assert(PAGE_SIZE % 8 == 0, "eight keys are taken from one page");

// E4M3 is exact in f16, and so are bf16 queries of any size that attention meets. int8 is exact in
// bf16, which weights keep their range in, times the scale of a value.
template <class T>
struct OperandOf {
  using type = Bf16;
  static constexpr bool is_f16 = false;
};
template <>
struct OperandOf<E4m3> {
  using type = F16;
  static constexpr bool is_f16 = true;
};
using Operand = OperandOf<Pool>::type;  // of the tensor cores
constexpr bool kE4m3 = OperandOf<Pool>::is_f16;
constexpr bool kBytes = kBits == 8;
constexpr bool kPacked = kBits == 4;
static_assert(kScaled == (kPacked || (kBytes && !kE4m3)), "int8 and 4 bits have scales");
static_assert(kRowBytes % 16 == 0, "rows of K and V are copied 16 bytes at a time");

// Four stored bytes as operands: the first two, the others.
__device__ inline uint2 byte_operands(unsigned four) {
  if constexpr (kE4m3) return e4m3_to_f16(four);
  // 0x4300 | n is the bf16 128 + n, n of 7 bits; with a sign bit too it is 256.
  const unsigned low = four & 0x7f7f7f7fu, sign = four & 0x80808080u;
  return {subtract_bf16(__byte_perm(low, 0x43434343u, 0x4140), __byte_perm(sign, 0x43434343u, 0x4140)),
          subtract_bf16(__byte_perm(low, 0x43434343u, 0x4342), __byte_perm(sign, 0x43434343u, 0x4342))};
}

// Four codes of 4 bits, each in a byte, as operands: the first two, the others.
__device__ inline uint2 code_operands(unsigned four) {
  // 0x4300 | n is the bf16 128 + n.
  return {subtract_bf16(__byte_perm(four, 0x43434343u, 0x4140), 0x43084308u),
          subtract_bf16(__byte_perm(four, 0x43434343u, 0x4342), 0x43084308u)};
}

// Two bf16 queries as operands.
__device__ inline unsigned query_operand(unsigned pair) {
  if constexpr (!kE4m3) return pair;
  return pack_f16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Optional inputs: a kernel's parameter, or null.
#if HAS_K_SCALE
#define K_SCALE_PARAMETER const float *k_scale,
#else
#define K_SCALE_PARAMETER
constexpr const float* k_scale = nullptr;
#endif
#if HAS_V_SCALE
#define V_SCALE_PARAMETER const float *v_scale,
#else
#define V_SCALE_PARAMETER
constexpr const float* v_scale = nullptr;
#endif
#if HAS_PRE_SCALE
#define PRE_SCALE_PARAMETER const float *pre_scale,
#else
#define PRE_SCALE_PARAMETER
constexpr const float* pre_scale = nullptr;
#endif
#if HAS_OUT_SCALE
#define OUT_SCALE_PARAMETER const float *out_scale,
#else
#define OUT_SCALE_PARAMETER
constexpr const float* out_scale = nullptr;
#endif
#if HAS_SINKS
#define SINKS_PARAMETER const float *sinks,
#else
#define SINKS_PARAMETER
constexpr const float* sinks = nullptr;
#endif

// The keys [first, end) that a sequence's last token sees, and the splits they fall into. It follows
// from the sequence's own length, so that no result depends on the rest of a batch.
struct Splits {
  int first, end;
  int begin;   // of the first split: a multiple of kTile
  int length;  // keys of a split: a multiple of SPLIT_KEYS
  int count;

  __device__ explicit Splits(int context) : end(context) {
    first = first_seen(context - 1);
    begin = first / kTile * kTile;
    length = SPLIT_KEYS * ceil_div(end - begin, SPLIT_KEYS * MAX_SPLITS);
    count = ceil_div(end - begin, length);
  }
};

}  // namespace trtc
