// Runs a CUDA C++ kernel on a CPU: every thread of a block is a fiber. Blocks run one by one, those
// of a cluster by turns.
//
// A fiber runs until it must wait for others: at a barrier, or where a warp exchanges registers.
// Asynchronous copies and products happen as late as they may (at the wait for them) or as early (at
// once), whichever `lazy` says: a kernel must be right both ways.
//
// This is what a kernel is compiled with. All that does not depend on the kernel is compiled once, in
// the .cpp files here, because it takes longer to compile than most kernels.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
// Of the block that runs. NaN at its start, in every format.
alignas(1024) extern unsigned char shared_bytes[256 * 1024];

namespace cuda_on_cpu {

constexpr int kWarp = 32, kWarpgroup = 128;

// Ends the launch, from within a fiber.
[[noreturn]] void fail(const char* message);

// What is done once for neighbouring threads, with what each of them has handed in.
using ForAll = void (*)(void* const* lanes, const void* what);

// All lanes of a warp, or of a warpgroup, hand in `mine`.
void exchange(int size, void* mine, ForAll all, const void* what);

// `all(lanes)` runs once, with a pointer a lane, and may write through them.
template <int kSize = kWarp, class T, class All>
inline void exchange_lanes(T& mine, const All& all) {
  const ForAll typed = [](void* const* lanes, const void* what) {
    T* of_type[kSize];
    for (int i = 0; i < kSize; ++i) of_type[i] = static_cast<T*>(lanes[i]);
    (*static_cast<const All*>(what))(of_type);
  };
  exchange(kSize, &mine, typed, &all);
}

// Memory that kernels before this one write: poison until the block has waited for them.
struct Late {
  unsigned char* address;
  std::size_t bytes;
};

struct Launch {
  void (*entry)();  // of a thread
  dim3 grid;
  int threads, cluster_size;
  bool lazy;
  const Late* late;
  int num_late;
};

// What went wrong, or null.
const char* launch(const Launch& launched);

}  // namespace cuda_on_cpu

void __syncthreads();
void __syncwarp();

// Every lane gets `value` of lane `from(lane)`.
template <class T, class From>
inline T shuffled(T value, From from) {
  cuda_on_cpu::exchange_lanes(value, [&](T* const* lanes) {
    T values[32];
    for (int i = 0; i < 32; ++i) values[i] = *lanes[i];
    for (int i = 0; i < 32; ++i) *lanes[i] = values[from(i)];
  });
  return value;
}

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return shuffled(value, [=](int lane) { return lane ^ mask; });
}

// `from` may differ from lane to lane.
template <class T>
inline T __shfl_sync(unsigned, T value, int from) {
  std::pair<T, int> both{value, from};
  cuda_on_cpu::exchange_lanes(both, [](std::pair<T, int>* const* lanes) {
    T values[32];
    for (int i = 0; i < 32; ++i) values[i] = lanes[i]->first;
    for (int i = 0; i < 32; ++i) lanes[i]->first = values[lanes[i]->second % 32];
  });
  return both.first;
}

template <class T>
inline T __shfl_up_sync(unsigned, T value, int by) {
  return shuffled(value, [=](int lane) { return lane < by ? lane : lane - by; });
}

int __any_sync(unsigned, int predicate);

inline unsigned __ballot_sync(unsigned, int predicate) {
  std::pair<int, unsigned> mine{predicate, 0};
  cuda_on_cpu::exchange_lanes(mine, [](std::pair<int, unsigned>* const* lanes) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(lanes[i]->first != 0) << i;
    for (int i = 0; i < 32; ++i) lanes[i]->second = votes;
  });
  return mine.second;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int atomicAdd(int* counter, int by) { return std::exchange(*counter, *counter + by); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = (static_cast<std::uint64_t>(b) << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned from = (selector >> (4 * i)) & 7;
    result |= static_cast<unsigned>((both >> (8 * from)) & 0xff) << (8 * i);
  }
  return result;
}
