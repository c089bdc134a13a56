// b, c, x = split(gated); out = c * (conv(b * x) + bias), over each sequence, and its new state.
#pragma once

#include "cpu/context.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct short_conv_args {
  View gated, state, query_start, context_lens, page_table, slots, weight, bias, out, state_out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

// Some channels of one sequence: everything that reads or writes its state for them.
template <class C, std::int64_t kMost>
struct ShortConv {
  using T = typename C::gated_t;
  const short_conv_args& a;
  std::int64_t first, count;
  float columns[C::columns][kMost] = {};  // oldest first; as T holds them

  typename C::state_t* state_in(std::int32_t page, std::int64_t column) const {
    return a.state.row<typename C::state_t>(page) + column * C::channels + first;
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
    const T* b = a.gated.row<const T>(number) + first;
    const T *c = b + C::channels, *x = c + C::channels;
    auto* out = a.out.row<typename C::out_t>(number) + first;
    for_vectors(count, [&](std::int64_t i, auto n) {
      const auto weight = [&](std::int64_t tap) { return load(a.weight.row<const float>(tap) + first + i, n); };
      const Floats now = rounded<T>(load(b + i, n) * load(x + i, n));
      Floats total = load(columns[0] + i, n) * weight(0);
      for (std::int64_t j = 1; j < C::columns; ++j) total = fma(load(columns[j] + i, n), weight(j), total);
      total = fma(now, weight(C::columns), total);
      if constexpr (!std::is_same_v<typename C::bias_t, none>) {
        total = total + load(a.bias.row<const float>(0) + first + i, n);
      }
      for (std::int64_t j = 1; j < C::columns; ++j) store(columns[j - 1] + i, load(columns[j] + i, n), n);
      store(columns[C::columns - 1] + i, now, n);
      store(out + i, load(c + i, n) * rounded<T>(total), n);
    });
  }
};

}  // namespace detail

template <class C>
void short_conv(Context& ctx, const short_conv_args& a) {
  static_assert(std::is_same_v<typename C::state_t, typename C::gated_t>, "the state holds what was rounded");
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
      const auto* pages = a.page_table.row<const std::int32_t>(sequence);
      const std::int64_t start = context_lens[sequence] - (rows_end - rows_begin);
      detail::ShortConv<C, kMost> conv{a, first, C::channels - first < kMost ? C::channels - first : kMost};
      if (start > 0) conv.load_state(pages[(start - 1) / C::page_size]);
      for (std::int64_t row = rows_begin; row < rows_end; ++row) {
        conv.row(row);
        const std::int32_t page = page_of(row);
        if (row + 1 == rows_end || page_of(row + 1) != page) conv.store_state(page);
      }
    }
  });
}

}  // namespace trtc
