// b, c, x = split(gated); out = c * (conv(b * x) + bias), over each sequence, and its new state.
#pragma once

#include "cpu/convolution.hpp"

namespace trtc {

struct short_conv_args {
  View gated, state, query_start, context_lens, page_table, slots, weight, bias, out, state_out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

template <class C>
struct GatedRows {
  using T = typename C::gated_t;
  const short_conv_args& a;

  const T* b(std::int64_t row, std::int64_t channel) const { return a.gated.row<const T>(row) + channel; }

  template <class N>
  Floats input(std::int64_t row, std::int64_t channel, N n) const {
    return rounded<T>(load(b(row, channel), n) * load(b(row, channel) + 2 * C::channels, n));
  }

  template <class N>
  void output(std::int64_t row, std::int64_t channel, Floats total, N n) const {
    if constexpr (!std::is_same_v<typename C::bias_t, none>) {
      total = total + load(a.bias.row<const float>(0) + channel, n);
    }
    const Floats c = load(b(row, channel) + C::channels, n);
    store(a.out.row<typename C::out_t>(row) + channel, c * rounded<T>(total), n);
  }
};

}  // namespace detail

template <class C>
void short_conv(Context& ctx, const short_conv_args& a) {
  static_assert(std::is_same_v<typename C::state_t, typename C::gated_t>, "the state holds what was rounded");
  convolve<C>(ctx, a, detail::GatedRows<C>{a});
}

}  // namespace trtc
