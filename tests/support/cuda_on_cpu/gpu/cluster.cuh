// plugins/gpu/cluster.cuh in plain C++.
#pragma once

#include "gpu/hopper.cuh"
#include "gpu/ptx.cuh"

namespace trtc {

int rank_in_cluster();
void arrive_at_cluster();
void wait_for_cluster();

unsigned address_in_block(unsigned address, int rank);
float load_from_block(unsigned remote);
float4 load_four_from_block(unsigned remote);
void store_in_block(unsigned remote, float4 values);

void arrive_in_block(unsigned remote);
inline void release_in_block(unsigned remote) { arrive_in_block(remote); }
inline void wait_for_blocks(unsigned barrier, unsigned parity) { wait_at(barrier, parity); }

}  // namespace trtc
