// Clusters: blocks that run at the same time and write to each other's shared memory.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

__device__ inline int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of the cluster arrives, later waits: all blocks have started then, and what their
// threads wrote to shared memory before they arrived is seen.
__device__ inline void arrive_at_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// This block's shared address -> the same one of the block of that rank.
__device__ inline unsigned address_in_block(unsigned address, int rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ inline float load_from_block(unsigned remote) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  return value;
}

__device__ inline float4 load_four_from_block(unsigned remote) {
  float4 values;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(remote)
               : "memory");
  return values;
}

__device__ inline void store_in_block(unsigned remote, float4 values) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(values.x),
               "f"(values.y), "f"(values.z), "f"(values.w)
               : "memory");
}

// A barrier (8 bytes, see make_barrier of gpu/hopper.cuh) that threads of other blocks arrive at:
// what they wrote before is seen after the wait.
__device__ inline void arrive_in_block(unsigned remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
               : "memory");
}
// The same, for a fraction of the time, of a thread that has only read: what it wrote need not be seen.
__device__ inline void release_in_block(unsigned remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
__device__ inline void wait_for_blocks(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done; AGAIN: "
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; "
      "@!done bra AGAIN;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace trtc
