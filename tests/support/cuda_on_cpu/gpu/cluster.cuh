// plugins/gpu/cluster.cuh in plain C++.
#pragma once

#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"

namespace trtc {

constexpr int kRankShift = 20;  // of an address in the cluster; shared memory is less

inline int rank_in_cluster() { return cuda_on_cpu::rank; }

inline void arrive_at_cluster() {
  auto& fiber = cuda_on_cpu::block.fibers[cuda_on_cpu::block.current];
  fiber.cluster_round = cuda_on_cpu::whole_cluster.round;
  const auto threads = cuda_on_cpu::block.fibers.size() * cuda_on_cpu::cluster.size();
  cuda_on_cpu::arrive(cuda_on_cpu::whole_cluster, static_cast<int>(threads), [] {});
}
inline void wait_for_cluster() {
  const auto round = cuda_on_cpu::block.fibers[cuda_on_cpu::block.current].cluster_round;
  cuda_on_cpu::wait_until([=] { return cuda_on_cpu::whole_cluster.round != round; });
}

inline unsigned address_in_block(unsigned address, int rank) {
  return address | static_cast<unsigned>(rank) << kRankShift;
}

inline unsigned char* place_in_block(unsigned remote) {
  const int rank = static_cast<int>(remote >> kRankShift);
  const bool here = rank == cuda_on_cpu::rank;
  unsigned char* const memory = here ? shared_bytes : cuda_on_cpu::cluster[rank].shared.get();
  return memory + remote % (1u << kRankShift);
}

inline float load_from_block(unsigned remote) {
  float value;
  std::memcpy(&value, place_in_block(remote), sizeof(value));
  return value;
}

inline float4 load_four_from_block(unsigned remote) {
  float4 values;
  std::memcpy(&values, place_in_block(remote), sizeof(values));
  return values;
}

inline void store_in_block(unsigned remote, float4 values) {
  std::memcpy(place_in_block(remote), &values, sizeof(values));
}

inline void arrive_in_block(unsigned remote) {
  arrive_at(*reinterpret_cast<Barrier*>(place_in_block(remote)));
}
inline void release_in_block(unsigned remote) { arrive_in_block(remote); }
inline void wait_for_blocks(unsigned barrier, unsigned parity) { wait_at(barrier, parity); }

}  // namespace trtc
