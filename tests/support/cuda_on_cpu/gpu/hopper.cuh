// plugins/gpu/hopper.cuh in plain C++.
#pragma once

#include "gpu/ptx.cuh"

namespace trtc {

struct Barrier {
  std::uint16_t count, missing, phase;
  std::int16_t expected;  // bytes to be copied, in units of 16; those that came first are negative
};

inline Barrier& barrier_at(unsigned address) {
  return *reinterpret_cast<Barrier*>(shared_bytes + address);
}

inline void make_barrier(unsigned barrier, int count) {
  const auto size = static_cast<std::uint16_t>(count);
  barrier_at(barrier) = {size, size, 0, 0};
}

inline void end_phase_if_due(Barrier& one) {
  if (one.missing == 0 && one.expected == 0) {
    one.missing = one.count;
    ++one.phase;
  }
}
inline void arrive_at(Barrier& one) {
  --one.missing;
  end_phase_if_due(one);
}
inline void arrive(unsigned barrier) { arrive_at(barrier_at(barrier)); }

// With late copies, they land when somebody waits at the barrier.
inline void arrive_when_copied(unsigned barrier) {
  if (!cuda_on_cpu::lazy) return arrive(barrier);
  auto& groups = cuda_on_cpu::block.fibers[cuda_on_cpu::block.current].groups;
  cuda_on_cpu::block.landings[barrier].push_back([barrier, landing = groups] {
    for (const auto& group : landing) {
      for (const auto& copy : group) copy.run();
    }
    arrive(barrier);
  });
  groups.assign(1, {});
}

inline void land(unsigned barrier) {
  for (const auto& landing : std::exchange(cuda_on_cpu::block.landings[barrier], {})) landing();
}

inline void wait_at(unsigned barrier, unsigned parity) {
  cuda_on_cpu::wait_until([=] {
    land(barrier);
    return (barrier_at(barrier).phase & 1) != parity;
  });
}

inline void sync_threads(int number, int threads) {
  cuda_on_cpu::meet(cuda_on_cpu::block.named[number], threads, [] {});
}

inline void arrive_at_threads(int number, int threads) {
  cuda_on_cpu::arrive(cuda_on_cpu::block.named[number], threads, [] {});
}

inline void publish_to_products() {}
template <int kCount>
inline void take_registers() {}
template <int kCount>
inline void give_registers() {}
inline void finish_before_waiting(float) {}
inline void begin_products() {}
template <int kCount>
inline void settle(float (&)[kCount]) {}

inline unsigned panel_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

inline unsigned long long operand_in_panels(unsigned address, unsigned panel_bytes) {
  return static_cast<unsigned long long>(panel_bytes) << 32 | address;
}

inline unsigned long long further(unsigned long long operand, unsigned bytes) {
  return operand + bytes;
}

// Element (line, along) of an operand: of a row, or of a column that runs down the panels' rows.
template <class T>
inline float element(unsigned long long operand, int row, int column) {
  const auto panel_bytes = static_cast<unsigned>(operand >> 32);
  constexpr int kColumns = 128 / sizeof(T);
  unsigned at = static_cast<unsigned>(operand) + row * 128 + column % kColumns * sizeof(T);
  at += column / kColumns * panel_bytes;
  at ^= (at >> 7 & 7) << 4;  // as the hardware swizzles addresses
  T bits;
  std::memcpy(&bits, shared_bytes + at, sizeof(T));
  return to_float(bits);
}

inline std::deque<std::vector<cuda_on_cpu::Product>>& products() {
  return cuda_on_cpu::block.products[cuda_on_cpu::block.current / 128];
}

template <class Lane>
inline void multiply(Lane& mine, void (*run)(const std::vector<Lane>&)) {
  cuda_on_cpu::exchange(cuda_on_cpu::block.groups, 128, mine, [=](auto& lanes) {
    std::vector<Lane> copies;
    for (const Lane* lane : lanes) copies.push_back(*lane);
    if (!cuda_on_cpu::lazy) return run(copies);
    products().back().push_back([=] { run(copies); });
  });
}

inline void commit_products() {
  int none = 0;
  cuda_on_cpu::exchange(cuda_on_cpu::block.groups, 128, none,
                        [](auto&) { products().emplace_back(); });
}

template <int kGroups>
inline void wait_for_products() {
  int none = 0;
  cuda_on_cpu::exchange(cuda_on_cpu::block.groups, 128, none, [](auto&) {
    while (products().size() > kGroups + 1) {
      for (const auto& product : products().front()) product();
      products().pop_front();
    }
  });
}

// Row and column of a lane's i-th accumulator.
inline int row_of(int lane, int i) { return lane / 32 * 16 + lane % 32 / 4 + i % 4 / 2 * 8; }
inline int column_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

template <class T, int kColumns>
inline void multiply_shared(float (&d)[kColumns / 2], unsigned long long a, unsigned long long b,
                            int add) {
  struct Lane {
    float* d;
    unsigned long long a, b;
    int add;
  };
  Lane mine{d, a, b, add};
  multiply<Lane>(mine, [](const std::vector<Lane>& lanes) {
    constexpr int kDepth = 32 / sizeof(T);
    const Lane& first = lanes[0];
    float left[64][kDepth], right[kColumns][kDepth];
    for (int k = 0; k < kDepth; ++k) {
      for (int row = 0; row < 64; ++row) left[row][k] = element<T>(first.a, row, k);
      for (int row = 0; row < kColumns; ++row) right[row][k] = element<T>(first.b, row, k);
    }
    for (int lane = 0; lane < 128; ++lane) {
      for (int i = 0; i < kColumns / 2; ++i) {
        float sum = first.add ? lanes[lane].d[i] : 0.f;
        for (int k = 0; k < kDepth; ++k) {
          sum += left[row_of(lane, i)][k] * right[column_of(lane, i)][k];
        }
        lanes[lane].d[i] = sum;
      }
    }
  });
}

// d += a . b, with element (k, column) of b by `at`.
template <class T, int kColumns>
inline void multiply_fragments(float (&d)[kColumns / 2], const unsigned (&a)[4],
                               unsigned long long b, float (*at)(unsigned long long, int, int)) {
  struct Lane {
    float* d;
    const unsigned* a;
    unsigned long long b;
    float (*at)(unsigned long long, int, int);
  };
  Lane mine{d, a, b, at};
  multiply<Lane>(mine, [](const std::vector<Lane>& lanes) {
    float left[64][16], right[16][kColumns];
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < kColumns; ++column) {
        right[k][column] = lanes[0].at(lanes[0].b, k, column);
      }
    }
    for (int lane = 0; lane < 128; ++lane) {
      const int row = lane / 32 * 16 + lane % 32 / 4;
      for (int part = 0; part < 4; ++part) {
        for (int i = 0; i < 2; ++i) {
          left[row + part % 2 * 8][lane % 4 * 2 + i + part / 2 * 8] =
              half_of<T>(lanes[lane].a[part], i);
        }
      }
    }
    for (int lane = 0; lane < 128; ++lane) {
      for (int i = 0; i < kColumns / 2; ++i) {
        for (int k = 0; k < 16; ++k) {
          lanes[lane].d[i] += left[row_of(lane, i)][k] * right[k][column_of(lane, i)];
        }
      }
    }
  });
}

template <class T, int kColumns>
inline void multiply_registers(float (&d)[kColumns / 2], const unsigned (&a)[4],
                               unsigned long long b) {
  multiply_fragments<T, kColumns>(d, a, b, element<T>);
}

template <class T, int kColumns>
inline void multiply_registers_by_rows(float (&d)[kColumns / 2], const unsigned (&a)[4],
                                       unsigned long long b) {
  multiply_fragments<T, kColumns>(d, a, b, [](unsigned long long operand, int k, int column) {
    return element<T>(operand, column, k);
  });
}

}  // namespace trtc
