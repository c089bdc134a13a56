// Barriers of shared memory, and products of warpgroups.
#include "gpu/hopper.cuh"

#include "barrier.hpp"
#include "block.hpp"

namespace trtc {

void make_barrier(unsigned barrier, int count) {
  const auto size = static_cast<std::uint16_t>(count);
  barrier_at(barrier) = {size, size, 0, 0};
}

void end_phase_if_due(Barrier& one) {
  if (one.missing == 0 && one.expected == 0) {
    one.missing = one.count;
    ++one.phase;
  }
}

void arrive_at(Barrier& one) {
  --one.missing;
  end_phase_if_due(one);
}

void arrive(unsigned barrier) { arrive_at(barrier_at(barrier)); }

void arrive_when_copied(unsigned barrier) {
  if (!cuda_on_cpu::lazy) return arrive(barrier);
  auto& groups = cuda_on_cpu::block.fiber().groups;
  cuda_on_cpu::block.landings[barrier].push_back([barrier, landing = groups] {
    for (const auto& group : landing) {
      for (const auto& copy : group) copy.run();
    }
    arrive(barrier);
  });
  groups.assign(1, {});
}

void wait_at(unsigned barrier, unsigned parity) {
  cuda_on_cpu::wait_until([=] {
    for (const auto& landing : std::exchange(cuda_on_cpu::block.landings[barrier], {})) landing();
    return (barrier_at(barrier).phase & 1) != parity;
  });
}

void sync_threads(int number, int threads) {
  cuda_on_cpu::meet(cuda_on_cpu::block.named[number], threads, [] {});
}

void arrive_at_threads(int number, int threads) {
  cuda_on_cpu::arrive(cuda_on_cpu::block.named[number], threads, [] {});
}

namespace {

using cuda_on_cpu::kWarpgroup;

std::deque<std::vector<cuda_on_cpu::Product>>& products() {
  return cuda_on_cpu::block.products[cuda_on_cpu::block.current / kWarpgroup];
}

template <class Lane, class Run>
void multiply(Lane mine, const Run& run) {
  cuda_on_cpu::exchange_lanes<kWarpgroup>(mine, [&](Lane* const* lanes) {
    std::vector<Lane> copies;
    for (int i = 0; i < kWarpgroup; ++i) copies.push_back(*lanes[i]);
    if (!cuda_on_cpu::lazy) return run(copies);
    products().back().push_back([run, copies] { run(copies); });
  });
}

// Row and column of a lane's i-th accumulator.
int row_of(int lane, int i) { return lane / 32 * 16 + lane % 32 / 4 + i % 4 / 2 * 8; }
int column_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

constexpr int kMostColumns = 256;

}  // namespace

void commit_products() {
  int none = 0;
  cuda_on_cpu::exchange_lanes<kWarpgroup>(none, [](int* const*) { products().emplace_back(); });
}

void finish_products(int most_left) {
  int none = 0;
  cuda_on_cpu::exchange_lanes<kWarpgroup>(none, [=](int* const*) {
    while (static_cast<int>(products().size()) > most_left + 1) {
      for (const auto& product : products().front()) product();
      products().pop_front();
    }
  });
}

void multiply_in_memory(float* d, int columns, int depth, OperandElement of, unsigned long long a,
                        unsigned long long b, int add) {
  struct Lane {
    float* d;
    unsigned long long a, b;
    int add;
  };
  multiply(Lane{d, a, b, add}, [=](const std::vector<Lane>& lanes) {
    const Lane& first = lanes[0];
    float left[64][32], right[kMostColumns][32];
    for (int k = 0; k < depth; ++k) {
      for (int row = 0; row < 64; ++row) left[row][k] = of(first.a, row, k);
      for (int row = 0; row < columns; ++row) right[row][k] = of(first.b, row, k);
    }
    for (int lane = 0; lane < kWarpgroup; ++lane) {
      for (int i = 0; i < columns / 2; ++i) {
        float sum = first.add ? lanes[lane].d[i] : 0.f;
        for (int k = 0; k < depth; ++k) {
          sum += left[row_of(lane, i)][k] * right[column_of(lane, i)][k];
        }
        lanes[lane].d[i] = sum;
      }
    }
  });
}

void multiply_with_registers(float* d, int columns, const unsigned* a, int each,
                             float (*element)(unsigned word, int which), unsigned long long b,
                             OperandElement at, int add) {
  struct Lane {
    float* d;
    const unsigned* a;
    unsigned long long b;
    int add;
  };
  multiply(Lane{d, a, b, add}, [=](const std::vector<Lane>& lanes) {
    float left[64][32], right[32][kMostColumns];
    const int depth = 8 * each;
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < columns; ++column) right[k][column] = at(lanes[0].b, k, column);
    }
    for (int lane = 0; lane < kWarpgroup; ++lane) {
      const int row = lane / 32 * 16 + lane % 32 / 4;
      for (int part = 0; part < 4; ++part) {
        for (int i = 0; i < each; ++i) {
          left[row + part % 2 * 8][(lane % 4 + part / 2 * 4) * each + i] =
              element(lanes[lane].a[part], i);
        }
      }
    }
    for (int lane = 0; lane < kWarpgroup; ++lane) {
      for (int i = 0; i < columns / 2; ++i) {
        float sum = lanes[0].add ? lanes[lane].d[i] : 0.f;
        for (int k = 0; k < depth; ++k) {
          sum += left[row_of(lane, i)][k] * right[k][column_of(lane, i)];
        }
        lanes[lane].d[i] = sum;
      }
    }
  });
}

}  // namespace trtc
