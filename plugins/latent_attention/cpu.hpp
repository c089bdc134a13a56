// out[head] = softmax(q[head] . latents * scale) . latents[:rank], causal: the attention of queries that
// share one KV head, whose values are the first elements of its keys.
#pragma once

#include "cpu/paged_attention.hpp"

namespace trtc {

struct latent_attention_args {
  View q, pool, query_start, context_lens, page_table, out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

template <class C>
struct LatentKeys : C {
  static_assert(C::planes == 1 && C::latents == 1);
  static constexpr std::int64_t num_kv_heads = 1, head_dim = C::width, value_dim = C::rank, window = 0, chunked = 0;
  static constexpr std::int64_t stored_width = head_dim;
  static constexpr float softcap = 0;
  using pre_scale_t = none;
  using out_scale_t = none;
  using sinks_t = none;
};

}  // namespace detail

template <class C>
std::size_t latent_attention_scratch(std::int64_t, int num_threads) {
  return attention::scratch_bytes<detail::LatentKeys<C>>(num_threads);
}

template <class C>
void latent_attention(Context& ctx, const latent_attention_args& a) {
  attention::Tensors tensors{};
  tensors.q = a.q;
  tensors.pool = a.pool;
  tensors.query_start = a.query_start;
  tensors.context_lens = a.context_lens;
  tensors.page_table = a.page_table;
  tensors.out = a.out;
  tensors.M = a.M;
  tensors.B = a.B;
  tensors.P = a.P;
  tensors.num_pages = a.num_pages;
  attention::attend<detail::LatentKeys<C>>(ctx, tensors);
}

}  // namespace trtc
