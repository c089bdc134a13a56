// out[head] = softmax(q[head] . latents * scale) . latents[:rank], causal: the attention of queries that
// share one KV head, whose values are the first elements of its keys. With a selection, a token that sees
// more than it holds attends to the slots of its row alone.
#pragma once

#include "cpu/paged_attention.hpp"

namespace trtc {

struct latent_attention_args {
  View q, pool, query_start, context_lens, page_table, selected, out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

template <class C>
struct LatentKeys : C {
  static_assert(C::planes == 1 && C::latents == 1);
  static constexpr std::int64_t num_kv_heads = 1, head_dim = C::width, value_dim = C::rank, window = 0, chunked = 0;
  static constexpr std::int64_t stored_width = head_dim;
  static constexpr std::int64_t end = 0;
  static constexpr float softcap = 0;
  using pre_scale_t = none;
  using out_scale_t = none;
  using sinks_t = none;
};

// Of tokens that see no more than a selection holds.
template <class C>
struct FirstKeys : LatentKeys<C> {
  static constexpr std::int64_t end = C::top_k;
};

// Of the others, for each of which the slots that are selected are pages of one token.
template <class C>
struct SelectedKeys : LatentKeys<C> {
  static constexpr std::int64_t page_size = 1;
};

}  // namespace detail

template <class C>
std::size_t latent_attention_scratch(std::int64_t max_rows, int num_threads) {
  const std::size_t rows = std::is_same_v<typename C::selected_t, none> ? 0 : max_rows * sizeof(std::int32_t);
  return attention::scratch_bytes<detail::LatentKeys<C>>(num_threads) + rows;
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
  if constexpr (std::is_same_v<typename C::selected_t, none>) {
    attention::attend<detail::LatentKeys<C>>(ctx, tensors);
  } else {
    attention::attend<detail::FirstKeys<C>>(ctx, tensors);
    using Selected = detail::SelectedKeys<C>;
    auto* rows = reinterpret_cast<std::int32_t*>(ctx.scratch + attention::scratch_bytes<Selected>(ctx.threads.size()));
    const auto* start = static_cast<const std::int32_t*>(a.query_start.data);
    const auto* contexts = static_cast<const std::int32_t*>(a.context_lens.data);
    std::int64_t count = 0;
    for (std::int64_t b = 0; b < a.B; ++b) {
      for (std::int32_t row = start[b]; row < start[b + 1]; ++row) {
        if (contexts[b] - (start[b + 1] - row) >= C::top_k) rows[count++] = row;
      }
    }
    tensors.page_table = a.selected;
    attention::attend_rows<Selected>(ctx, tensors, rows, count, C::top_k);
  }
}

}  // namespace trtc
