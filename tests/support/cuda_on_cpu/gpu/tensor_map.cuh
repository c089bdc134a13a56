// plugins/gpu/tensor_map.cuh in plain C++.
#pragma once

#include <array>
#include <numeric>

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

inline void arrive_and_expect(unsigned barrier, unsigned bytes) {
  Barrier& one = barrier_at(barrier);
  one.expected = static_cast<std::int16_t>(one.expected + bytes / 16);
  arrive_at(one);
}

inline int tile_rows(const TensorMap& map) {
  return std::accumulate(map.box + 1, map.box + 5, 1, std::multiplies<>());
}

using Coordinates = std::array<int, 5>;  // of a tile's first byte

// The tile's rows of 128 bytes to an address of some block's shared memory, swizzled by it as the
// hardware does.
inline void write_tile(unsigned char* memory, unsigned to, const TensorMap& map,
                       const Coordinates& begin) {
  for (int row = 0, rows = tile_rows(map); row < rows; ++row) {
    std::array<unsigned, 5> at{static_cast<unsigned>(begin[0])};
    for (int i = 1, rest = row; i < 5; ++i) {
      at[i] = begin[i] + rest % map.box[i];
      rest /= static_cast<int>(map.box[i]);
    }
    const unsigned char* from = map.bytes;
    bool inside = true;
    for (int i = 0; i < 5; ++i) {
      from += at[i] * map.strides[i];
      inside = inside && at[i] < map.sizes[i];
    }
    for (int chunk = 0; chunk < 8; ++chunk) {
      const bool there = inside && at[0] + 16 * chunk < map.sizes[0];
      const unsigned at = to + row * 128, swizzled = at + ((chunk ^ (at >> 7 & 7)) << 4);
      cuda_on_cpu::Copy{memory + swizzled, from + 16 * chunk, there ? 16 : 0, 16}.run();
    }
  }
}

inline void copy_tile_to_blocks(unsigned shared, const TensorMap* map, unsigned barrier,
                                const Coordinates& begin, unsigned short blocks) {
  const auto count = [units = tile_rows(*map) * 128 / 16](Barrier& one) {
    one.expected = static_cast<std::int16_t>(one.expected - units);
    end_phase_if_due(one);
  };
  for (int rank = 0; rank < static_cast<int>(cuda_on_cpu::cluster.size()); ++rank) {
    if (!(blocks >> rank & 1)) continue;
    if (cuda_on_cpu::lazy) {
      const bool here = rank == cuda_on_cpu::rank;
      auto& block = here ? cuda_on_cpu::block : cuda_on_cpu::cluster[rank].block;
      // Lands while its block runs, whose shared memory then is in its place.
      block.landings[barrier].push_back([=] {
        write_tile(shared_bytes, shared, *map, begin);
        count(barrier_at(barrier));
      });
    } else {
      write_tile(place_in_block(address_in_block(0, rank)), shared, *map, begin);
      count(*reinterpret_cast<Barrier*>(place_in_block(address_in_block(barrier, rank))));
    }
  }
}

inline void copy_tile_to_blocks(unsigned shared, const TensorMap* map, unsigned barrier, int column,
                                int last, unsigned short blocks) {
  copy_tile_to_blocks(shared, map, barrier, {column, 0, 0, 0, last}, blocks);
}

inline void copy_tile(unsigned shared, const TensorMap* map, unsigned barrier, int column, int second,
                      int third, int last) {
  const auto here = static_cast<unsigned short>(1 << cuda_on_cpu::rank);
  copy_tile_to_blocks(shared, map, barrier, {column, second, third, 0, last}, here);
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
