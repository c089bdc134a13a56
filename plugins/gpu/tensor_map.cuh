// Copies of tiles into shared memory by TMA, and the tensor maps that say where they
// are. A map is made on the device, so that a launch takes addresses alone.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

// 128 opaque bytes (CUtensorMap).
struct alignas(128) TensorMap {
  unsigned long long words[16];
};

// Bytes in kRank dimensions of which the first is contiguous, and the tile that a copy takes of them:
// `box` bytes along each dimension, the first 128 of them, which is a row of a panel (panel_offset of
// gpu/hopper.cuh). What a copy finds outside is zeros.
template <int kRank>
struct Tiled {
  const void* bytes;
  unsigned sizes[kRank];
  unsigned long long strides[kRank];  // bytes, multiples of 16; the first is not read
  unsigned box[kRank];
};

template <int kDimension>
__device__ inline void set_dimension(unsigned map, unsigned size, unsigned box) {
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(map),
               "n"(kDimension), "r"(size)
               : "memory");
  asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(map),
               "n"(kDimension), "r"(box)
               : "memory");
  asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(map),
               "n"(kDimension), "r"(1)
               : "memory");
}

template <int kDimension>
__device__ inline void set_stride(unsigned map, unsigned long long stride) {
  asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;" ::"r"(map),
               "n"(kDimension - 1), "l"(stride)
               : "memory");
}

template <int kDimension, int kRank>
__device__ inline void set_dimensions(unsigned map, const Tiled<kRank>& tiled) {
  if constexpr (kDimension < kRank) {
    set_dimension<kDimension>(map, tiled.sizes[kDimension], tiled.box[kDimension]);
    if constexpr (kDimension > 0) set_stride<kDimension>(map, tiled.strides[kDimension]);
    set_dimensions<kDimension + 1>(map, tiled);
  }
}

// Makes a map, in shared memory first; all lanes of one warp. Copies that threads of this block start
// after it may use the map.
template <int kRank>
__device__ inline void make_map(TensorMap* map, TensorMap& shared, const Tiled<kRank>& tiled) {
  const unsigned at = shared_address(&shared);
  if (threadIdx.x % 32 == 0) {
    for (unsigned long long& word : shared.words) word = 0;
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(at),
                 "l"(tiled.bytes)
                 : "memory");
    asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], %1;" ::"r"(at),
                 "n"(kRank - 1)
                 : "memory");
    set_dimensions<0>(at, tiled);
    asm volatile(
        "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 0;\n"           // bytes
        "tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;\n"  // none
        "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 3;\n"       // 128 bytes
        "tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(at)  // zeros
        : "memory");
  }
  __syncwarp();
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
      "[%0], [%1], 128;\n"
      "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map),
      "r"(at)
      : "memory");
}

// Arrives at the barrier, whose phase then ends once so many bytes have been copied too.
__device__ inline void arrive_and_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Starts a copy of so many contiguous bytes, a multiple of 16.
__device__ inline void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Starts a copy of so many contiguous bytes, a multiple of 16, the other way. Threads that wrote them have
// published them (publish_to_products).
__device__ inline void store_bytes(void* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
               "cp.async.bulk.commit_group;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// Until all that this thread stores so has been read from shared memory; until it has been written.
__device__ inline void wait_for_store_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Starts the copy of the tile of a map of two dimensions whose first byte is at (column, row).
__device__ inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column,
                                 int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same of three and four dimensions.
__device__ inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column,
                                 int second, int last) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(second), "r"(last)
      : "memory");
}
__device__ inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column,
                                 int second, int third, int last) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(second), "r"(third), "r"(last)
      : "memory");
}

// The same of five dimensions, at 0 in those between the first and the last, by an L2 policy.
__device__ inline void stream_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column,
                                   int last, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(last), "l"(policy), "r"(0)
      : "memory");
}

// Prefetches the map for later copies.
__device__ inline void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A tile of five dimensions, at 0 in those between the first and the last, to these addresses of
// every block of the cluster that `blocks` has a bit of, and counted at the barrier of each.
__device__ inline void copy_tile_to_blocks(unsigned shared, const TensorMap* map, unsigned barrier,
                                           int column, int last, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(last), "h"(blocks), "r"(0)
      : "memory");
}

}  // namespace trtc
