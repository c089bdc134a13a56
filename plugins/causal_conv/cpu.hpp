// out = silu(conv(x) + bias), over each sequence, and its new state.
#pragma once

#include "cpu/activation.hpp"
#include "cpu/convolution.hpp"

namespace trtc {

struct causal_conv_args {
  View x, state, query_start, context_lens, page_table, slots, weight, bias, out, state_out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

template <class C>
struct PlainRows {
  const causal_conv_args& a;

  template <class N>
  Floats input(std::int64_t row, std::int64_t channel, N n) const {
    return load(a.x.row<const typename C::x_t>(row) + channel, n);
  }

  template <class N>
  void output(std::int64_t row, std::int64_t channel, Floats total, N n) const {
    if constexpr (!std::is_same_v<typename C::bias_t, none>) total = total + load(a.bias.row<const float>(0) + channel, n);
    store(a.out.row<typename C::out_t>(row) + channel, activated<Activation::silu>(total), n);
  }
};

}  // namespace detail

template <class C>
void causal_conv(Context& ctx, const causal_conv_args& a) {
  static_assert(std::is_same_v<typename C::state_t, typename C::x_t>, "the state holds the inputs");
  convolve<C>(ctx, a, detail::PlainRows<C>{a});
}

}  // namespace trtc
