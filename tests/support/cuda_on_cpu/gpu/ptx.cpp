// Copies, and products of warps.
#include "gpu/ptx.cuh"

#include "block.hpp"

namespace trtc {

void wait_for_earlier_kernels() { cuda_on_cpu::settle_late(); }

void copy_async(unsigned to, const void* from, int bytes, int total) {
  if (to % total || reinterpret_cast<std::uintptr_t>(from) % total) {
    cuda_on_cpu::fail("a copy is not aligned");
  }
  const cuda_on_cpu::Copy copy{shared_bytes + to, from, bytes, total};
  if (!cuda_on_cpu::lazy) return copy.run();
  cuda_on_cpu::block.fiber().groups.back().push_back(copy);
}

void commit_copies() { cuda_on_cpu::block.fiber().groups.emplace_back(); }

void finish_copies(int most_left) {
  auto& groups = cuda_on_cpu::block.fiber().groups;
  while (static_cast<int>(groups.size()) > most_left + 1) {
    for (const auto& copy : groups.front()) copy.run();
    groups.pop_front();
  }
}

uint4 load_matrices(unsigned from) {
  struct Lane {
    unsigned from, words[4];
  };
  Lane mine{from, {}};
  cuda_on_cpu::exchange_lanes(mine, [](Lane* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const unsigned row = lanes[8 * i + lane / 4]->from;
        std::memcpy(&lanes[lane]->words[i], shared_bytes + row + lane % 4 * 4, 4);
      }
    }
  });
  return {mine.words[0], mine.words[1], mine.words[2], mine.words[3]};
}

unsigned transpose_matrix(unsigned word) {
  struct Lane {
    unsigned word, transposed;
  };
  Lane mine{word, 0};
  cuda_on_cpu::exchange_lanes(mine, [](Lane* const* lanes) {
    const auto element = [&](int row, int column) {
      return lanes[4 * row + column / 2]->word >> column % 2 * 16 & 0xffffu;
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int column = lane / 4, row = lane % 4 * 2;
      lanes[lane]->transposed = element(row, column) | element(row + 1, column) << 16;
    }
  });
  return mine.transposed;
}

void multiply_fragments(float* d, const unsigned* a, const unsigned* b, int bytes,
                        float (*element)(unsigned word, int which)) {
  struct Lane {
    float* d;
    const unsigned *a, *b;
  };
  Lane mine{d, a, b};
  cuda_on_cpu::exchange_lanes(mine, [=](Lane* const* lanes) {
    const int depth = 32 / bytes, word = 4 / bytes;
    float left[16][32], right[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < word; ++i) {
        for (int part = 0; part < 4; ++part) {
          const int k = word * t + i + part / 2 * depth / 2;
          left[g + part % 2 * 8][k] = element(lanes[lane]->a[part], i);
        }
        for (int part = 0; part < 2; ++part) {
          right[word * t + i + part * depth / 2][g] = element(lanes[lane]->b[part], i);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float sum = lanes[lane]->d[i];
        for (int k = 0; k < depth; ++k) {
          sum += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
        }
        lanes[lane]->d[i] = sum;
      }
    }
  });
}

void multiply_16x8x32(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Lane {
    int* d;
    unsigned a[4], b[2];
  };
  Lane mine{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  cuda_on_cpu::exchange_lanes(mine, [](Lane* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
          const unsigned left = lanes[row * 4 + k % 16 / 4]->a[half + k / 16 * 2];
          const unsigned right = lanes[column * 4 + k % 16 / 4]->b[k / 16];
          lanes[lane]->d[i] += static_cast<signed char>(left >> 8 * (k % 4)) *
                               static_cast<signed char>(right >> 8 * (k % 4));
        }
      }
    }
  });
}

}  // namespace trtc
