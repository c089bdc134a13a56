// Instructions of sm_90a alone: WGMMA (by a warpgroup: four warps, 128 threads), mbarriers, and
// registers that one warpgroup gives up for another (setmaxnreg).
//
// Like gpu/ptx.cuh, with another file of that name in the tests.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

// A barrier in shared memory (8 bytes) that `count` arrivals bring to its next phase.
__device__ inline void make_barrier(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void arrive(unsigned barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier)
               : "memory");
}

// Arrives when all copies that this thread has started are done (copy_async_16).
__device__ inline void arrive_when_copied(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until the barrier has left the phase of that parity (0 for the first); a new barrier counts as
// having left parity 1.
__device__ inline void wait_at(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done; AGAIN: "
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
      "@!done bra AGAIN;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Until `threads` threads of the block are here; `number` from 1 (0 is __syncthreads).
__device__ inline void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Is counted at that barrier as one of them, and goes on.
__device__ inline void arrive_at_threads(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// What this thread has written to shared memory, or has seen copied there, can be read by the WGMMAs
// that it issues, or that a thread issues which synchronises with it next.
__device__ inline void publish_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers a thread of this warpgroup has from here on.
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// A matrix of 2-byte elements (or E4M3) in shared memory, in panels of 64 columns (or 128): rows of
// 128 bytes, whose 16-byte chunk c of row r lies at place c ^ (r % 8). Panels begin at multiples of
// 1024 bytes.
__device__ inline unsigned panel_offset(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Such a matrix as an operand. The products' k runs along its rows (`panel_bytes` is not used then),
// or down its columns, with `panel_bytes` from one panel to the next.
__device__ inline unsigned long long operand_in_panels(unsigned address, unsigned panel_bytes) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62, kEightRows = 1024;
  return ((address & 0x3ffff) >> 4) | static_cast<unsigned long long>(panel_bytes >> 4) << 16 |
         (kEightRows >> 4) << 32 | kSwizzle128;
}

// A matrix [rows, 32 bytes] without swizzle as an operand: cores of eight rows of 16 bytes, each 128 bytes in a
// row, with so many bytes from one to the next along a row, and from eight rows to the next.
__device__ inline unsigned long long operand_in_cores(unsigned address, unsigned along_bytes,
                                                      unsigned rows_bytes) {
  return ((address & 0x3ffff) >> 4) | static_cast<unsigned long long>(along_bytes >> 4) << 16 |
         static_cast<unsigned long long>(rows_bytes >> 4) << 32;
}

// The operand that begins so many bytes further: along its rows (a multiple of 32, less than 128), or
// eight rows or a panel on (multiples of 1024).
__device__ inline unsigned long long further(unsigned long long operand, unsigned bytes) {
  return operand + (bytes >> 4);
}

// Registers that products read or add to are settled before, and not touched until they are waited
// for.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last kGroups committed groups are done.
template <int kGroups>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Computes `value`, which is never negative, before a wait for WGMMAs that follows. The compiler moves
// such a wait as early as it may, before the very arithmetic that should overlap the WGMMAs; it moves
// nothing over a branch.
__device__ inline void finish_before_waiting(float value) {
  if (__any_sync(0xffffffffu, value < 0.f)) asm volatile("trap;");
}

// What products wrote is read after this, and not before.
template <int kCount>
__device__ inline void settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d [64, kColumns] = (add ? d : 0) + a . b^T, for a [64, 16] and b [kColumns, 16] in shared memory (or
// 32 of E4M3). Lane 4g + t of warp w has d[4j + i]: row 16w + g (i < 2) or 8 more, column
// 8j + 2t + i % 2.
template <class T, int kColumns>
__device__ inline void multiply_shared(float (&d)[kColumns / 2], unsigned long long a,
                                       unsigned long long b, int add);

// d [64, kColumns] += a . b, for b [16, kColumns] in shared memory and a [64, 16] in registers, a
// warp's 16 rows as in multiply_16x8x16.
template <class T, int kColumns>
__device__ inline void multiply_registers(float (&d)[kColumns / 2], const unsigned (&a)[4],
                                          unsigned long long b);

// d [64, kColumns] += a . b^T, the same for b [kColumns, 16].
template <class T, int kColumns>
__device__ inline void multiply_registers_by_rows(float (&d)[kColumns / 2], const unsigned (&a)[4],
                                                  unsigned long long b);

// d [64, kColumns] = (add ? d : 0) + a . b^T, for b [kColumns, 32] of E4M3 in cores, with four elements of
// a where those have two.
template <int kColumns>
__device__ inline void multiply_registers_by_cores(float (&d)[kColumns / 2], const unsigned (&a)[4],
                                                   unsigned long long b, int add);

#define REGISTERS_4 "%0, %1, %2, %3"
#define REGISTERS_8 REGISTERS_4 ", %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_24 REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_32 REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_48 REGISTERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_64 REGISTERS_48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_96 REGISTERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_128 REGISTERS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FLOATS_4(d, n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define FLOATS_8(d, n) FLOATS_4(d, n), FLOATS_4(d, n + 4)
#define FLOATS_16(d, n) FLOATS_8(d, n), FLOATS_8(d, n + 8)
#define FLOATS_24(d, n) FLOATS_16(d, n), FLOATS_8(d, n + 16)
#define FLOATS_32(d, n) FLOATS_16(d, n), FLOATS_16(d, n + 16)
#define FLOATS_48(d, n) FLOATS_32(d, n), FLOATS_16(d, n + 32)
#define FLOATS_64(d, n) FLOATS_32(d, n), FLOATS_32(d, n + 32)
#define FLOATS_96(d, n) FLOATS_64(d, n), FLOATS_32(d, n + 64)
#define FLOATS_128(d, n) FLOATS_64(d, n), FLOATS_64(d, n + 64)

#define MULTIPLY_SHARED(T, TYPE, DEPTH, COLUMNS, COUNT, A, B, ADD, MORE)                         \
  template <>                                                                                    \
  __device__ inline void multiply_shared<T, COLUMNS>(float (&d)[COUNT], unsigned long long a,    \
                                                     unsigned long long b, int add) {            \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0; "                                \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS DEPTH ".f32." TYPE "." TYPE " {"   \
                 REGISTERS_##COUNT "}, " A ", " B ", add, 1, 1" MORE ";}"                        \
                 : FLOATS_##COUNT(d, 0)                                                          \
                 : "l"(a), "l"(b), "r"(add));                                                    \
  }
#define MULTIPLY_REGISTERS(NAME, T, TYPE, COLUMNS, COUNT, A, B, DOWN_COLUMNS)                    \
  template <>                                                                                    \
  __device__ inline void NAME<T, COLUMNS>(float (&d)[COUNT], const unsigned (&a)[4],             \
                                          unsigned long long b) {                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {"      \
                 REGISTERS_##COUNT "}, " A ", " B ", 1, 1, 1, " DOWN_COLUMNS ";"                 \
                 : FLOATS_##COUNT(d, 0)                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
  }
#define MULTIPLY_ALL_REGISTERS(NAME, T, TYPE, DOWN_COLUMNS)                                      \
  MULTIPLY_REGISTERS(NAME, T, TYPE, 8, 4, "{%4, %5, %6, %7}", "%8", DOWN_COLUMNS)                \
  MULTIPLY_REGISTERS(NAME, T, TYPE, 16, 8, "{%8, %9, %10, %11}", "%12", DOWN_COLUMNS)            \
  MULTIPLY_REGISTERS(NAME, T, TYPE, 32, 16, "{%16, %17, %18, %19}", "%20", DOWN_COLUMNS)         \
  MULTIPLY_REGISTERS(NAME, T, TYPE, 64, 32, "{%32, %33, %34, %35}", "%36", DOWN_COLUMNS)         \
  MULTIPLY_REGISTERS(NAME, T, TYPE, 128, 64, "{%64, %65, %66, %67}", "%68", DOWN_COLUMNS)
#define MULTIPLY_ALL_SHARED(T, TYPE, DEPTH, MORE)                                                \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 8, 4, "%4", "%5", "%6", MORE)                                  \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 16, 8, "%8", "%9", "%10", MORE)                                \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 32, 16, "%16", "%17", "%18", MORE)                             \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 64, 32, "%32", "%33", "%34", MORE)                             \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 128, 64, "%64", "%65", "%66", MORE)                            \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 192, 96, "%96", "%97", "%98", MORE)                            \
  MULTIPLY_SHARED(T, TYPE, DEPTH, 256, 128, "%128", "%129", "%130", MORE)
#define MULTIPLY(T, TYPE)                                                                        \
  MULTIPLY_ALL_SHARED(T, TYPE, "k16", ", 0, 0")                                                  \
  MULTIPLY_ALL_REGISTERS(multiply_registers, T, TYPE, "1")                                       \
  MULTIPLY_ALL_REGISTERS(multiply_registers_by_rows, T, TYPE, "0")                               \
  MULTIPLY_REGISTERS(multiply_registers_by_rows, T, TYPE, 96, 48, "{%48, %49, %50, %51}", "%52", "0") \
  MULTIPLY_REGISTERS(multiply_registers_by_rows, T, TYPE, 192, 96, "{%96, %97, %98, %99}", "%100", "0")

#define MULTIPLY_BY_CORES(COLUMNS, COUNT, A, B, ADD)                                             \
  template <>                                                                                    \
  __device__ inline void multiply_registers_by_cores<COLUMNS>(                                   \
      float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int add) {                \
    asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0; "                                \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {"              \
                 REGISTERS_##COUNT "}, " A ", " B ", add, 1, 1;}"                                \
                 : FLOATS_##COUNT(d, 0)                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                \
  }

MULTIPLY(Bf16, "bf16")
MULTIPLY(F16, "f16")
MULTIPLY_ALL_SHARED(E4m3, "e4m3", "k32", "")
MULTIPLY_BY_CORES(8, 4, "{%4, %5, %6, %7}", "%8", "%9")
MULTIPLY_BY_CORES(16, 8, "{%8, %9, %10, %11}", "%12", "%13")
MULTIPLY_BY_CORES(32, 16, "{%16, %17, %18, %19}", "%20", "%21")
MULTIPLY_BY_CORES(48, 24, "{%24, %25, %26, %27}", "%28", "%29")
MULTIPLY_BY_CORES(64, 32, "{%32, %33, %34, %35}", "%36", "%37")

#undef MULTIPLY_BY_CORES
#undef MULTIPLY
#undef MULTIPLY_ALL_SHARED
#undef MULTIPLY_ALL_REGISTERS
#undef MULTIPLY_REGISTERS
#undef MULTIPLY_SHARED

}  // namespace trtc
