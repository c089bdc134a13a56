// The block that runs, and those of its cluster.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "device.hpp"

namespace cuda_on_cpu {

constexpr std::size_t kStackBytes = 128 * 1024;

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
struct Stack {
  std::unique_ptr<char[]> bytes;

  Stack();
  Stack(const Stack&) = delete;
  ~Stack();
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
  std::vector<void*> inputs;  // of the lanes of a meeting, by thread
  std::map<unsigned, std::vector<std::function<void()>>> landings;  // of copies, by barrier
  int running = 0, current = 0;
  jmp_buf scheduler;

  Fiber& fiber() { return fibers[current]; }
};

// A block of a cluster while another one runs: what that has in `block` and in shared memory.
struct Waiting {
  Block block;
  std::unique_ptr<unsigned char[]> shared{new unsigned char[sizeof(shared_bytes)]};
};

extern Block block;
extern std::vector<Waiting> cluster;
extern Meeting whole_cluster;
extern int rank;
extern bool lazy;

// Until others have run.
void yield();

// That a fiber got what it waited for, or was the last to come: the block goes on.
void note_progress();

// Waits until `ready` holds; some other fiber has to make it so.
template <class Ready>
inline void wait_until(Ready ready) {
  while (!ready()) yield();
  note_progress();
}

// Whether this was the last of them, who goes on.
template <class Last>
inline bool arrive(Meeting& meeting, int size, Last last) {
  if (++meeting.arrived < size) return false;
  last();
  meeting.arrived = 0;
  ++meeting.round;
  note_progress();
  return true;
}

template <class Last>
inline void meet(Meeting& meeting, int size, Last last) {
  const unsigned round = meeting.round;
  if (!arrive(meeting, size, last)) {
    wait_until([&] { return meeting.round != round; });
  }
}

// From now on the memory that earlier kernels write has what they wrote.
void settle_late();

}  // namespace cuda_on_cpu
