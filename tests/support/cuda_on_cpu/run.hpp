// The library that a test calls: `run` launches ENTRY, in clusters of CLUSTER blocks if it says so,
// and answers what went wrong, or null.
#pragma once

#include "device.hpp"

#ifndef CLUSTER
#define CLUSTER 1
#endif

namespace cuda_on_cpu {

inline void* const* given;

template <class... Arguments, std::size_t... index>
void call(void (*kernel)(Arguments...), std::index_sequence<index...>) {
  kernel(static_cast<Arguments>(given[index])...);
}

// A kernel whose parameters are all addresses, in a thread.
template <class... Arguments>
void call(void (*kernel)(Arguments...)) {
  call(kernel, std::index_sequence_for<Arguments...>());
}

}  // namespace cuda_on_cpu

extern "C" const char* run(void* const* arguments, const unsigned* grid, int threads, int lazy,
                           const cuda_on_cpu::Late* late, int num_late) {
  cuda_on_cpu::given = arguments;
  const auto entry = [] { cuda_on_cpu::call(ENTRY); };
  const dim3 blocks{grid[0], grid[1], grid[2]};
  return cuda_on_cpu::launch({entry, blocks, threads, CLUSTER, lazy != 0, late, num_late});
}
