// plugins/gpu/tensor_map.cuh in plain C++.
#pragma once

#include "gpu/cluster.cuh"

namespace trtc {

template <int kRank>
struct Tiled {
  const void* bytes;
  unsigned sizes[kRank];
  unsigned long long strides[kRank];
  unsigned box[kRank];
};

// Any rank as five dimensions, the missing ones in the middle.
struct alignas(128) TensorMap {
  const unsigned char* bytes;
  unsigned sizes[5];
  unsigned long long strides[5];
  unsigned box[5];
};
static_assert(sizeof(TensorMap) == 128);

template <int kRank>
inline void make_map(TensorMap* map, TensorMap&, const Tiled<kRank>& tiled) {
  if (threadIdx.x % 32 == 0) {
    *map = {static_cast<const unsigned char*>(tiled.bytes), {1, 1, 1, 1, 1}, {}, {1, 1, 1, 1, 1}};
    for (int i = 0; i < kRank; ++i) {
      const int at = i == kRank - 1 ? 4 : i;
      map->sizes[at] = tiled.sizes[i];
      map->strides[at] = i == 0 ? 1 : tiled.strides[i];
      map->box[at] = tiled.box[i];
      if (i > 0 && tiled.strides[i] % 16) cuda_on_cpu::fail("a stride of a map is not aligned");
    }
    if (map->box[0] != 128) cuda_on_cpu::fail("rows of a tile are not those of a panel");
  }
  __syncwarp();
}

void arrive_and_expect(unsigned barrier, unsigned bytes);

void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier);

void store_bytes(void* global, unsigned shared, unsigned bytes);
void wait_for_store_reads();
inline void wait_for_stores() { wait_for_store_reads(); }

// Of a tile's first byte.
struct Coordinates {
  int at[5];
};

// The tile's rows of 128 bytes to the same place of some blocks.
void copy_tile_to_blocks(unsigned shared, const TensorMap* map, unsigned barrier,
                         const Coordinates& begin, unsigned short blocks);

inline void copy_tile_to_blocks(unsigned shared, const TensorMap* map, unsigned barrier, int column,
                                int last, unsigned short blocks) {
  copy_tile_to_blocks(shared, map, barrier, {{column, 0, 0, 0, last}}, blocks);
}

inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column, int second,
                      int third, int last) {
  const auto here = static_cast<unsigned short>(1 << rank_in_cluster());
  copy_tile_to_blocks(shared, map, barrier, {{column, second, third, 0, last}}, here);
}
inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column, int second,
                      int last) {
  copy_tile(shared, map, barrier, column, second, 0, last);
}
inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column, int last) {
  copy_tile(shared, map, barrier, column, 0, 0, last);
}

inline void stream_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column, int last,
                        unsigned long long) {
  copy_tile(shared, map, barrier, column, last);
}

inline void prefetch_map(const TensorMap*) {}

}  // namespace trtc
