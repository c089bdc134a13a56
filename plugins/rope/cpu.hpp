// out = rope(norm(q)), or norm(rope(q)).
#pragma once

#include "cpu/context.hpp"
#include "cpu/rotary.hpp"

namespace trtc {

struct rope_args {
  View q, positions, cos, sin, q_norm, out;
  std::int64_t M;
};

template <class C>
void rope(Context& ctx, const rope_args& a) {
  using T = typename C::q_t;
  static_assert(std::is_same_v<T, typename C::out_t>);
  static_assert(C::rotary_dim == 2 * C::rotary_half && C::rotary_dim <= C::head_dim);
  const auto* positions = static_cast<const std::int32_t*>(a.positions.data);
  const auto* q_norm = static_cast<const float*>(a.q_norm.data);

  ctx.threads.parallel_for(a.M, rows_a_part(C::num_heads * C::head_dim), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* cos = a.cos.row<const float>(positions[row]);
      const float* sin = a.sin.row<const float>(positions[row]);
      for (std::int64_t head = 0; head < C::num_heads; ++head) {
        T* rotated = a.out.row<T>(row) + head * C::head_dim;
        const T* source = a.q.row<const T>(row) + head * C::head_dim;
        detail::normed_and_rotated<C, typename C::q_norm_t>(rotated, source, q_norm, cos, sin);
      }
    }
  });
}

}  // namespace trtc
