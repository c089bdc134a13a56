// Fibers, blocks and clusters.
#include "block.hpp"

#include <algorithm>

dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) unsigned char shared_bytes[256 * 1024];

namespace cuda_on_cpu {

namespace {

// Made before the blocks, which give their stacks back at their end.
std::vector<std::unique_ptr<char[]>> spare_stacks;

}  // namespace

Block block;
std::vector<Waiting> cluster;
Meeting whole_cluster;
int rank = 0;
bool lazy = false;

namespace {

// What a kernel may read late, and what is to be there then.
struct Poisoned {
  Late memory;
  std::vector<unsigned char> contents;
};

std::vector<Poisoned> late;
bool waited = false;
unsigned idle_rounds = 0;
const char* failure = nullptr;
void (*entry)() = nullptr;

void poison_late() {
  for (const Poisoned& one : late) std::memset(one.memory.address, 0xff, one.memory.bytes);
  waited = false;
}

// Until it yields.
[[gnu::noinline]] void resume(Fiber& fiber) {
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

void fiber_main() {
  entry();
  block.fiber().done = true;
  --block.running;
  yield();
}

void start_block(int threads) {
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
void advance_block() {
  const int threads = static_cast<int>(block.fibers.size());
  for (int i = 0; i < threads && failure == nullptr; ++i) {
    if (block.fibers[i].done) continue;
    block.current = i;
    threadIdx.x = i;
    resume(block.fibers[i]);
  }
}

// The block of that rank takes the place of the one that is there, if there are several.
void swap_block() {
  if (cluster.size() == 1) return;
  std::swap(block, cluster[rank].block);
  std::swap_ranges(shared_bytes, shared_bytes + sizeof(shared_bytes), cluster[rank].shared.get());
}

void run_cluster(int threads, int size) {
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

}  // namespace

Stack::Stack() {
  if (spare_stacks.empty()) {
    bytes.reset(new char[kStackBytes]);
  } else {
    bytes = std::move(spare_stacks.back());
    spare_stacks.pop_back();
  }
}
Stack::~Stack() { spare_stacks.push_back(std::move(bytes)); }

[[gnu::noinline]] void yield() {
  if (_setjmp(block.fiber().at) == 0) _longjmp(block.scheduler, 1);
}

void note_progress() { idle_rounds = 0; }

void fail(const char* message) {
  failure = message;
  for (;;) yield();
}

void exchange(int size, void* mine, ForAll all, const void* what) {
  const int first = block.current / size * size;
  block.inputs[block.current] = mine;
  auto& meetings = size == kWarp ? block.warps : block.groups;
  meet(meetings[first / size], size, [&] { all(&block.inputs[first], what); });
}

void settle_late() {
  if (!waited) {
    for (const Poisoned& one : late) {
      std::memcpy(one.memory.address, one.contents.data(), one.memory.bytes);
    }
  }
  waited = true;
}

const char* launch(const Launch& launched) {
  entry = launched.entry;
  lazy = launched.lazy;
  late.clear();
  for (const Late* one = launched.late; one != launched.late + launched.num_late; ++one) {
    late.push_back({*one, {one->address, one->address + one->bytes}});
  }
  const dim3 grid = gridDim = launched.grid;
  blockDim = {static_cast<unsigned>(launched.threads), 1, 1};
  failure = nullptr;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x && !failure; blockIdx.x += launched.cluster_size) {
        run_cluster(launched.threads, launched.cluster_size);
      }
    }
  }
  return failure;
}

}  // namespace cuda_on_cpu

void __syncthreads() {
  // Threads that have ended are not waited for, and none ends here while others wait.
  cuda_on_cpu::meet(cuda_on_cpu::block.all, cuda_on_cpu::block.running, [] {});
}

void __syncwarp() {
  int none = 0;
  cuda_on_cpu::exchange_lanes(none, [](int* const*) {});
}

int __any_sync(unsigned, int predicate) {
  cuda_on_cpu::exchange_lanes(predicate, [](int* const* lanes) {
    int any = 0;
    for (int i = 0; i < 32; ++i) any |= *lanes[i];
    for (int i = 0; i < 32; ++i) *lanes[i] = any;
  });
  return predicate;
}
