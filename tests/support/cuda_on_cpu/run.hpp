// The library that a test calls: `run` launches ENTRY, in clusters of CLUSTER blocks if it says so,
// and answers what went wrong, or null.
#pragma once

#include "device.hpp"

#ifndef CLUSTER
#define CLUSTER 1
#endif

extern "C" const char* run(void* const* arguments, const unsigned* grid, int threads, int lazy_mode,
                           void* const* late, const std::size_t* late_bytes, int num_late) {
  using namespace cuda_on_cpu;
  cuda_on_cpu::lazy = lazy_mode;
  cuda_on_cpu::late.clear();
  for (int i = 0; i < num_late; ++i) {
    auto* const address = static_cast<unsigned char*>(late[i]);
    cuda_on_cpu::late.push_back({address, {address, address + late_bytes[i]}});
  }
  return launch(ENTRY, arguments, {grid[0], grid[1], grid[2]}, threads, CLUSTER);
}
