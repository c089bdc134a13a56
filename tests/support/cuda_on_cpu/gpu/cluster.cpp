// Blocks of a cluster, and tiles that are copied to some of them.
#include "gpu/cluster.cuh"

#include <array>
#include <numeric>

#include "barrier.hpp"
#include "block.hpp"
#include "gpu/tensor_map.cuh"

namespace trtc {

namespace {

constexpr int kRankShift = 20;  // of an address in the cluster; shared memory is less

unsigned char* place_in_block(unsigned remote) {
  const int rank = static_cast<int>(remote >> kRankShift);
  const bool here = rank == cuda_on_cpu::rank;
  unsigned char* const memory = here ? shared_bytes : cuda_on_cpu::cluster[rank].shared.get();
  return memory + remote % (1u << kRankShift);
}

Barrier& barrier_in_block(unsigned remote) {
  return *reinterpret_cast<Barrier*>(place_in_block(remote));
}

}  // namespace

int rank_in_cluster() { return cuda_on_cpu::rank; }

void arrive_at_cluster() {
  cuda_on_cpu::block.fiber().cluster_round = cuda_on_cpu::whole_cluster.round;
  const auto threads = cuda_on_cpu::block.fibers.size() * cuda_on_cpu::cluster.size();
  cuda_on_cpu::arrive(cuda_on_cpu::whole_cluster, static_cast<int>(threads), [] {});
}

void wait_for_cluster() {
  const auto round = cuda_on_cpu::block.fiber().cluster_round;
  cuda_on_cpu::wait_until([=] { return cuda_on_cpu::whole_cluster.round != round; });
}

unsigned address_in_block(unsigned address, int rank) {
  return address | static_cast<unsigned>(rank) << kRankShift;
}

float load_from_block(unsigned remote) {
  float value;
  std::memcpy(&value, place_in_block(remote), sizeof(value));
  return value;
}

float4 load_four_from_block(unsigned remote) {
  float4 values;
  std::memcpy(&values, place_in_block(remote), sizeof(values));
  return values;
}

void store_in_block(unsigned remote, float4 values) {
  std::memcpy(place_in_block(remote), &values, sizeof(values));
}

void arrive_in_block(unsigned remote) { arrive_at(barrier_in_block(remote)); }

void arrive_and_expect(unsigned barrier, unsigned bytes) {
  Barrier& one = barrier_at(barrier);
  one.expected = static_cast<std::int16_t>(one.expected + bytes / 16);
  arrive_at(one);
}

namespace {

int tile_rows(const TensorMap& map) {
  return std::accumulate(map.box + 1, map.box + 5, 1, std::multiplies<>());
}

// The tile's rows of 128 bytes to an address of some block's shared memory, swizzled by it as the
// hardware does.
void write_tile(unsigned char* memory, unsigned to, const TensorMap& map,
                const Coordinates& begin) {
  for (int row = 0, rows = tile_rows(map); row < rows; ++row) {
    std::array<unsigned, 5> at{static_cast<unsigned>(begin.at[0])};
    for (int i = 1, rest = row; i < 5; ++i) {
      at[i] = begin.at[i] + rest % map.box[i];
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

void count_bytes(Barrier& one, unsigned bytes) {
  one.expected = static_cast<std::int16_t>(one.expected - bytes / 16);
  end_phase_if_due(one);
}

}  // namespace

void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(global) % 16 || shared % 16) {
    cuda_on_cpu::fail("a copy is not aligned");
  }
  const auto land = [=] {
    const int size = static_cast<int>(bytes);
    cuda_on_cpu::Copy{shared_bytes + shared, static_cast<const unsigned char*>(global), size, size}.run();
    count_bytes(barrier_at(barrier), bytes);
  };
  if (!cuda_on_cpu::lazy) return land();
  cuda_on_cpu::block.landings[barrier].push_back(land);
}

void store_bytes(void* global, unsigned shared, unsigned bytes) {
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(global) % 16 || shared % 16) {
    cuda_on_cpu::fail("a copy is not aligned");
  }
  const int size = static_cast<int>(bytes);
  const cuda_on_cpu::Copy copy{global, shared_bytes + shared, size, size};
  if (!cuda_on_cpu::lazy) return copy.run();
  cuda_on_cpu::block.fiber().groups.back().push_back(copy);
}

void wait_for_store_reads() {
  auto& groups = cuda_on_cpu::block.fiber().groups;
  for (const auto& copy : groups.back()) copy.run();
  groups.back().clear();
}

void copy_tile_to_blocks(unsigned shared, const TensorMap* map, unsigned barrier,
                         const Coordinates& begin, unsigned short blocks) {
  const auto count = [bytes = tile_rows(*map) * 128](Barrier& one) { count_bytes(one, bytes); };
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
      count(barrier_in_block(address_in_block(barrier, rank)));
    }
  }
}

}  // namespace trtc
