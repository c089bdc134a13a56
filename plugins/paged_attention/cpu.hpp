// out = quantize(softmax(q . K * scale) . V), causal, over each sequence's pages.
#pragma once

#include "cpu/paged_attention.hpp"

namespace trtc {

namespace detail {

template <class C>
struct KeysAndValues : C {
  static constexpr std::int64_t value_dim = C::head_dim, end = 0;
};

}  // namespace detail

using paged_attention_args = attention::Tensors;

template <class C>
std::size_t paged_attention_scratch(std::int64_t, int num_threads) {
  return attention::scratch_bytes<detail::KeysAndValues<C>>(num_threads);
}

template <class C>
void paged_attention(Context& ctx, const paged_attention_args& a) {
  attention::attend<detail::KeysAndValues<C>>(ctx, a);
}

}  // namespace trtc
