// What a kernel is given besides its tensors: the thread pool and this step's scratch memory.
#pragma once

#include <cstddef>

#include "thread_pool.hpp"

namespace trtc {

struct Context {
  ThreadPool& threads;
  std::byte* scratch;  // scratch_bytes of 64-byte aligned memory for each thread
  std::size_t scratch_bytes;

  std::byte* thread_scratch(int thread) const { return scratch + scratch_bytes * thread; }
};

}  // namespace trtc
