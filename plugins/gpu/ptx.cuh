// The PTX instructions that kernels use by name, and conversions between element types.
//
// Kernels say `#include "gpu/ptx.cuh"`. The tests run them on a CPU with another file of that name
// (tests/support/cuda_on_cpu), which has the same functions as plain C++.
#pragma once

namespace trtc {

struct Bf16 {
  unsigned short bits;
};
struct F16 {
  unsigned short bits;
};
struct E4m3 {
  unsigned char bits;
};
struct I8 {
  signed char value;
};
struct U4x2 {
  unsigned char bits;
};

// What is below is for one thread; where a function needs a whole warp, all its lanes call it.

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Has the compiler work out what follows from x again, instead of keeping it in registers.
__device__ inline void forget(unsigned& x) { asm volatile("" : "+r"(x)); }

// Programmatic dependent launch (PDL). What kernels before this one wrote may be read after wait, and
// every block calls it before it ends: the end of this kernel is then the end of those too. Macros of
// gpu/concurrent.py, undefined unless they are 1: with RELEASES_LATE the next kernel starts when this
// one's wait is over, with WAITS_LAST only wait_last waits.
__device__ inline void wait_for_earlier_kernels() {
#if HAS_PDL && !WAITS_LAST
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if RELEASES_LATE
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#endif
}

// The next kernel may start once every block has said this or ended.
__device__ inline void let_next_kernel_start() {
#if HAS_PDL && !RELEASES_LATE
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The last thing that a kernel does for which WAITS_LAST may be 1.
__device__ inline void wait_last() {
#if HAS_PDL && WAITS_LAST
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads what no kernel writes, now: the compiler would put it next to its use.
__device__ inline float load_early(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}

__device__ inline float4 load_early(const float4* address) {
  float4 four;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(address));
  return four;
}

// The same of what kernels before this one wrote.
__device__ inline uint4 load_now(const uint4* address) {
  uint4 four;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(address)
               : "memory");
  return four;
}

// Marks lines as the first to leave the L2 cache: for what is read once.
__device__ inline unsigned long long evict_first() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Prefetches bytes, a multiple of 16, to the L2 cache.
__device__ inline void prefetch_to_l2(const void* global, unsigned bytes) {
#if HAS_BULK_COPIES
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Starts a copy of 16 bytes from global to shared memory; only `bytes` of them are read, the rest is
// zeros.
__device__ inline void copy_async_16(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// The same of whole lines of 128 bytes that nobody else reads. `shared` must be the thread's own: with
// an address that ptxas knows to be the same for all lanes it makes an illegal instruction of the
// policy (NVRTC 13.0, sm_90a).
__device__ inline void stream_async(unsigned shared, const void* global, int bytes,
                                    unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                   shared),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

// A copy of four bytes.
__device__ inline void copy_async_4(unsigned shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ inline uint4 load_shared(unsigned shared) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(shared)
               : "memory");
  return words;
}

__device__ inline uint2 load_shared_8(unsigned shared) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(shared) : "memory");
  return words;
}

__device__ inline void store_shared(unsigned shared, uint2 words) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(words.x), "r"(words.y)
               : "memory");
}

__device__ inline void store_shared(unsigned shared, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// Four matrices of eight rows of 16 bytes, from the addresses that lanes 8i ... 8i + 7 have of the
// i-th one's rows: lane 4g + t has bytes 4t ... 4t + 3 of row g of each.
__device__ inline uint4 load_matrices(unsigned shared) {
  uint4 words;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(shared)
               : "memory");
  return words;
}

// Of a matrix of eight rows of eight 2-byte elements, of which lane 4g + t has 2t and 2t + 1 of row g, those of
// column g.
__device__ inline unsigned transpose_matrix(unsigned word) {
  unsigned transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

// Closes a group of copies; an empty one is a group too.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last kGroups groups of this thread have landed.
template <int kGroups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// (word & mask) ^ flip, in one instruction even of two constants.
__device__ inline unsigned mask_and_flip(unsigned word, unsigned mask, unsigned flip) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(flip));
  return result;
}

// a - b of two bf16 each.
__device__ inline unsigned subtract_bf16(unsigned a, unsigned b) {
  unsigned result;
  asm("{.reg .b32 one; mov.b32 one, 0xbf80bf80; fma.rn.bf16x2 %0, %2, one, %1;}"
      : "=r"(result)
      : "r"(a), "r"(b));
  return result;
}

// a * b + c of two bf16 each, rounded once.
__device__ inline unsigned multiply_add_bf16(unsigned a, unsigned b, unsigned c) {
  unsigned result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// The sum of four signed bytes.
__device__ inline int sum_bytes(unsigned word) {
  return __dp4a(static_cast<int>(word), 0x01010101, 0);
}

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// 2^x, within 2 units of the last place; 0 for -infinity.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 unit of the last place.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / y, within 2 units of the last place: the division of Triton's kernels.
__device__ inline float divided_full(float x, float y) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
  return quotient;
}

// Two floats to bf16, `low` in the low half.
__device__ inline unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two floats to f16, `low` in the low half.
__device__ inline unsigned pack_f16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four floats to E4M3, saturating, the first in the lowest byte.
__device__ inline unsigned pack_e4m3(float a, float b, float c, float d) {
  unsigned packed = 0;
#if HAS_E4M3
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
#endif
  return packed;
}

// Four E4M3 values to f16, exactly: the low two and the high two.
__device__ inline uint2 e4m3_to_f16(unsigned four) {
  uint2 pairs = {0, 0};
#if HAS_E4M3  // without it builder/targets/gpu refuses the kernel
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(four));
#endif
  return pairs;
}

__device__ inline float to_float(Bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

__device__ inline float to_float(F16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}

// Rounds to nearest even; E4m3 and I8 saturate.
template <class T>
__device__ inline T round_to(float x);

template <>
__device__ inline float round_to<float>(float x) {
  return x;
}

template <>
__device__ inline Bf16 round_to<Bf16>(float x) {
  return {static_cast<unsigned short>(pack_bf16(x, 0.f) & 0xffff)};
}

template <>
__device__ inline E4m3 round_to<E4m3>(float x) {
  unsigned short packed = 0;
#if HAS_E4M3
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(0.f), "f"(x));
#endif
  return {static_cast<unsigned char>(packed)};
}

template <>
__device__ inline I8 round_to<I8>(float x) {
  int rounded;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return {static_cast<signed char>(rounded)};
}

// d += a . b for a [16, 16], b [16, 8]; lane 4g + t has
//   a: rows g (a0, a2) and g + 8 (a1, a3), columns 2t, 2t + 1 (a0, a1) and 8 more (a2, a3)
//   b: column g, rows 2t, 2t + 1 (b0) and 8 more (b1)
//   d: rows g (d0, d1) and g + 8 (d2, d3), columns 2t, 2t + 1
template <class T>
__device__ inline void multiply_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1);

template <>
__device__ inline void multiply_16x8x16<Bf16>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_16x8x16<F16>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for a [16, 32] and b [32, 8] of E4M3, with four elements where those have two.
template <>
__device__ inline void multiply_16x8x16<E4m3>(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
#if HAS_E4M3
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// The same of signed bytes, for a [16, 32] and b [32, 8], with four elements where those have two.
__device__ inline void multiply_16x8x32(int (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace trtc
