// Runs a CUDA C++ kernel on a CPU: every thread of a block is a fiber. Blocks run one by one, those
// of a cluster by turns.
//
// A fiber runs until it must wait for others: at a barrier, or where a warp exchanges registers.
// Asynchronous copies and products happen as late as they may (at the wait for them) or as early (at
// once), whichever `lazy` says: a kernel must be right both ways.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

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

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
// Of the block that runs. NaN at its start, in every format.
alignas(1024) inline unsigned char shared_bytes[256 * 1024];

namespace cuda_on_cpu {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr int kWarp = 32;

// Memory that kernels before this one write: poison until the block has waited for them.
struct Late {
  unsigned char* address;
  std::vector<unsigned char> contents;
};

struct Copy {
  void* to;
  const void* from;
  int bytes, total;

  void run() const {
    std::memset(to, 0, total);
    std::memcpy(to, from, bytes);
  }
};

// Of a fiber; blocks take those of the blocks before them.
inline std::vector<std::unique_ptr<char[]>> spare_stacks;

struct Stack {
  std::unique_ptr<char[]> bytes;

  Stack() {
    if (spare_stacks.empty()) {
      bytes.reset(new char[kStackBytes]);
    } else {
      bytes = std::move(spare_stacks.back());
      spare_stacks.pop_back();
    }
  }
  Stack(const Stack&) = delete;
  ~Stack() { spare_stacks.push_back(std::move(bytes)); }
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;  // once it has begun. swapcontext would ask the kernel for signal masks each time
  Stack stack;
  bool begun = false, done = false;
  std::deque<std::vector<Copy>> groups{1};  // the last one is open
  unsigned cluster_round = 0;
};

// Where a number of threads meet: the last to come does what is to be done for all.
struct Meeting {
  int arrived = 0;
  unsigned round = 0;
};

// A product of a warpgroup, which may happen at any time until it is waited for.
using Product = std::function<void()>;

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps, groups;
  std::vector<std::deque<std::vector<Product>>> products;  // by warpgroup; the last one is open
  Meeting all, named[16];
  std::vector<const void*> inputs;  // of the lanes of a meeting, by thread
  std::map<unsigned, std::vector<std::function<void()>>> landings;  // of copies, by barrier
  int running = 0, current = 0;
  jmp_buf scheduler;
};

inline Block block;
inline bool lazy = false, waited = false;
inline std::vector<Late> late;
inline unsigned idle_rounds = 0;
inline const char* failure = nullptr;

[[gnu::noinline]] inline void yield() {
  if (_setjmp(block.fibers[block.current].at) == 0) _longjmp(block.scheduler, 1);
}

// Until it yields.
[[gnu::noinline]] inline void resume(Fiber& fiber) {
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

// Ends the launch, from within a fiber.
[[noreturn]] inline void fail(const char* message) {
  failure = message;
  for (;;) yield();
}

// Waits until `ready` holds; some other fiber has to make it so.
template <class Ready>
inline void wait_until(Ready ready) {
  while (!ready()) yield();
  idle_rounds = 0;
}

// Whether this was the last of them, who goes on.
template <class Last>
inline bool arrive(Meeting& meeting, int size, Last last) {
  if (++meeting.arrived < size) return false;
  last();
  meeting.arrived = 0;
  ++meeting.round;
  idle_rounds = 0;
  return true;
}

template <class Last>
inline void meet(Meeting& meeting, int size, Last last) {
  const unsigned round = meeting.round;
  if (!arrive(meeting, size, last)) {
    wait_until([&] { return meeting.round != round; });
  }
}

// All lanes of `size` neighbouring threads hand in `mine`; `all(inputs)` runs once, with a pointer
// a lane, and may write through them.
template <class T, class All>
inline void exchange(std::vector<Meeting>& meetings, int size, T& mine, All all) {
  const int first = block.current / size * size;
  block.inputs[block.current] = &mine;
  meet(meetings[first / size], size, [&] {
    std::vector<T*> lanes(size);
    for (int i = 0; i < size; ++i) {
      lanes[i] = static_cast<T*>(const_cast<void*>(block.inputs[first + i]));
    }
    all(lanes);
  });
}

template <class T, class All>
inline void exchange_warp(T& mine, All all) {
  exchange(block.warps, kWarp, mine, all);
}

inline void poison_late() {
  for (const Late& one : late) std::memset(one.address, 0xff, one.contents.size());
  waited = false;
}

inline void settle_late() {
  if (!waited) {
    for (const Late& one : late) {
      std::memcpy(one.address, one.contents.data(), one.contents.size());
    }
  }
  waited = true;
}

inline std::function<void()> entry;

inline void fiber_main() {
  entry();
  block.fibers[block.current].done = true;
  --block.running;
  yield();
}

// A block of a cluster while another one runs: what that has in `block` and in shared memory.
struct Waiting {
  Block block;
  std::unique_ptr<unsigned char[]> shared{new unsigned char[sizeof(shared_bytes)]};
};
inline std::vector<Waiting> cluster;
inline Meeting whole_cluster;
inline int rank = 0;

inline void start_block(int threads) {
  std::memset(shared_bytes, 0xff, sizeof(shared_bytes));
  block.fibers = std::vector<Fiber>(threads);
  block.warps = std::vector<Meeting>(threads / kWarp);
  block.groups = std::vector<Meeting>((threads + 127) / 128);
  block.products.assign(block.groups.size(), std::deque<std::vector<Product>>(1));
  block.all = {};
  for (Meeting& one : block.named) one = {};
  block.inputs.assign(threads, nullptr);
  block.landings.clear();
  block.running = threads;
  for (Fiber& fiber : block.fibers) {
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.bytes.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
  }
}

// Every thread of the block runs until it must wait.
inline void advance_block() {
  const int threads = static_cast<int>(block.fibers.size());
  for (int i = 0; i < threads && failure == nullptr; ++i) {
    if (block.fibers[i].done) continue;
    block.current = i;
    threadIdx.x = i;
    resume(block.fibers[i]);
  }
}

// The block of that rank takes the place of the one that is there, if there are several.
inline void swap_block() {
  if (cluster.size() == 1) return;
  std::swap(block, cluster[rank].block);
  std::swap_ranges(shared_bytes, shared_bytes + sizeof(shared_bytes), cluster[rank].shared.get());
}

inline void run_cluster(int threads, int size) {
  poison_late();
  whole_cluster = {};
  cluster = std::vector<Waiting>(size);
  const unsigned first = blockIdx.x;
  for (rank = 0; rank < size; ++rank) {
    swap_block();
    start_block(threads);
    swap_block();
  }
  int running = size;
  for (idle_rounds = 0; running > 0 && failure == nullptr; ++idle_rounds) {
    if (idle_rounds > 1000) failure = "a block waits for ever";
    running = 0;
    for (rank = 0; rank < size; ++rank) {
      swap_block();
      blockIdx.x = first + rank;
      advance_block();
      running += block.running > 0;
      swap_block();
    }
  }
  blockIdx.x = first;
  if (!waited && failure == nullptr) failure = "a block never waited for earlier kernels";
}

template <class... Arguments, std::size_t... index>
void set_entry(void (*kernel)(Arguments...), void* const* arguments, std::index_sequence<index...>) {
  entry = [=] { kernel(static_cast<Arguments>(arguments[index])...); };
}

// Runs a kernel whose parameters are all addresses; what went wrong, or null.
template <class... Arguments>
const char* launch(void (*kernel)(Arguments...), void* const* arguments, dim3 grid, int threads,
                   int cluster_size) {
  set_entry(kernel, arguments, std::index_sequence_for<Arguments...>());
  gridDim = grid;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  failure = nullptr;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x && !failure; blockIdx.x += cluster_size) {
        run_cluster(threads, cluster_size);
      }
    }
  }
  return failure;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  // Threads that have ended are not waited for, and none ends here while others wait.
  cuda_on_cpu::meet(cuda_on_cpu::block.all, cuda_on_cpu::block.running, [] {});
}

inline void __syncwarp() {
  int none = 0;
  cuda_on_cpu::exchange_warp(none, [](auto&) {});
}

// Every lane gets `value` of lane `from(lane)`.
template <class T, class From>
inline T shuffled(T value, From from) {
  cuda_on_cpu::exchange_warp(value, [&](auto& lanes) {
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
  cuda_on_cpu::exchange_warp(both, [](auto& lanes) {
    T values[32];
    for (int i = 0; i < 32; ++i) values[i] = lanes[i]->first;
    for (int i = 0; i < 32; ++i) lanes[i]->first = values[lanes[i]->second % 32];
  });
  return both.first;
}

inline int __any_sync(unsigned, int predicate) {
  cuda_on_cpu::exchange_warp(predicate, [](auto& lanes) {
    int any = 0;
    for (const int* lane : lanes) any |= *lane;
    for (int* lane : lanes) *lane = any;
  });
  return predicate;
}

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
