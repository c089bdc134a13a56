// Causal, depthwise convolutions of a few taps over the sequences of a step, with states in pages.
#pragma once

#include "context.hpp"
#include "vector.hpp"

namespace trtc {

// Some channels of one sequence: everything that reads or writes its state for them. `Rows` says
// what the convolution reads and what becomes of its result:
//
//   Floats input(row, channel, n) const;              as the state holds it
//   void output(row, channel, Floats total, n) const;
template <class C, class Args, class Rows, std::int64_t kMost>
struct Convolution {
  using State = typename C::state_t;
  const Args& a;
  const Rows& rows;
  std::int64_t first, count;
  float columns[C::columns][kMost] = {};  // oldest first

  State* state_in(std::int32_t page, std::int64_t column) const {
    return a.state.template row<State>(page) + column * C::channels + first;
  }

  void load_state(std::int32_t page) {
    for (std::int64_t j = 0; j < C::columns; ++j) {
      const auto* from = state_in(page, j);
      for_vectors(count, [&](std::int64_t i, auto n) { store(columns[j] + i, load(from + i, n), n); });
    }
  }

  void store_state(std::int32_t page) const {
    for (std::int64_t j = 0; j < C::columns; ++j) {
      auto* to = state_in(page, j);
      for_vectors(count, [&](std::int64_t i, auto n) { store(to + i, load(columns[j] + i, n), n); });
    }
  }

  void row(std::int64_t number) {
    for_vectors(count, [&](std::int64_t i, auto n) {
      const auto weight = [&](std::int64_t tap) {
        return load(a.weight.template row<const float>(tap) + first + i, n);
      };
      const Floats now = rows.input(number, first + i, n);
      Floats total = load(columns[0] + i, n) * weight(0);
      for (std::int64_t j = 1; j < C::columns; ++j) total = fma(load(columns[j] + i, n), weight(j), total);
      total = fma(now, weight(C::columns), total);
      for (std::int64_t j = 1; j < C::columns; ++j) store(columns[j - 1] + i, load(columns[j] + i, n), n);
      store(columns[C::columns - 1] + i, now, n);
      rows.output(number, first + i, total, n);
    });
  }
};

template <class C, class Args, class Rows>
void convolve(Context& ctx, const Args& a, const Rows& rows) {
  constexpr std::int64_t kMost = 64;  // channels that a thread takes at a time
  constexpr std::int64_t blocks = (C::channels + kMost - 1) / kMost;
  const auto* query_start = static_cast<const std::int32_t*>(a.query_start.data);
  const auto* context_lens = static_cast<const std::int32_t*>(a.context_lens.data);
  const auto page_of = [slots = static_cast<const std::int32_t*>(a.slots.data)](std::int64_t row) {
    return slots[row] / static_cast<std::int32_t>(C::page_size);
  };
  const std::int64_t grain = rows_a_part(4 * kMost * ((a.M + a.B - 1) / a.B));
  ctx.threads.parallel_for(a.B * blocks, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t sequence = part / blocks, first = part % blocks * kMost;
      const std::int64_t rows_begin = query_start[sequence], rows_end = query_start[sequence + 1];
      const auto* pages = a.page_table.template row<const std::int32_t>(sequence);
      const std::int64_t start = context_lens[sequence] - (rows_end - rows_begin);
      const std::int64_t count = C::channels - first < kMost ? C::channels - first : kMost;
      Convolution<C, Args, Rows, kMost> convolution{a, rows, first, count};
      if (start > 0) convolution.load_state(pages[(start - 1) / C::page_size]);
      for (std::int64_t row = rows_begin; row < rows_end; ++row) {
        convolution.row(row);
        const std::int32_t page = page_of(row);
        if (row + 1 == rows_end || page_of(row + 1) != page) convolution.store_state(page);
      }
    }
  });
}

}  // namespace trtc
