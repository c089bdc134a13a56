// q_out = rope(norm(q)) * q_scale, or norm(rope(q)); pool[slots] = (rope(norm(k)) / k_scale, norm(v) / v_scale).
#pragma once

#include "cpu/context.hpp"
#include "cpu/paged_pool.hpp"
#include "cpu/rotary.hpp"

namespace trtc {

struct rope_kv_write_args {
  View q, k, v, positions, slots, cos, sin, q_norm, k_norm, v_norm, q_scale, k_scale, v_scale, pool, q_out, pool_out;
  std::int64_t M, num_pages;
};

template <class C>
void rope_kv_write(Context& ctx, const rope_kv_write_args& a) {
  using T = typename C::q_t;
  static_assert(std::is_same_v<T, typename C::k_t> && std::is_same_v<T, typename C::v_t>);
  static_assert(std::is_same_v<T, typename C::q_out_t>);
  static_assert(C::rotary_dim == 2 * C::rotary_half && C::rotary_dim <= C::head_dim);
  constexpr std::int64_t columns = (C::num_heads + 2 * C::num_kv_heads) * C::head_dim;
  auto* pool = static_cast<typename C::pool_t*>(a.pool.data);
  const auto* positions = static_cast<const std::int32_t*>(a.positions.data);
  const auto* slots = static_cast<const std::int32_t*>(a.slots.data);
  const auto* q_norm = static_cast<const float*>(a.q_norm.data);
  const auto* k_norm = static_cast<const float*>(a.k_norm.data);
  [[maybe_unused]] const auto* v_norm = static_cast<const float*>(a.v_norm.data);

  ctx.threads.parallel_for(a.M, rows_a_part(columns), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* cos = a.cos.row<const float>(positions[row]);
      const float* sin = a.sin.row<const float>(positions[row]);
      for (std::int64_t head = 0; head < C::num_heads; ++head) {
        T* out = a.q_out.row<T>(row) + head * C::head_dim;
        const T* source = a.q.row<const T>(row) + head * C::head_dim;
        detail::normed_and_rotated<C, typename C::q_norm_t>(out, source, q_norm, cos, sin);
        if constexpr (!std::is_same_v<typename C::q_scale_t, none>) {
          const float scale = static_cast<const float*>(a.q_scale.data)[positions[row]];
          for_vectors(C::head_dim, [&](std::int64_t i, auto n) { store(out + i, load(out + i, n) * scale, n); });
        }
      }
      for (std::int64_t head = 0; head < C::num_kv_heads; ++head) {
        T rotated[C::head_dim];
        const T* source = a.k.row<const T>(row) + head * C::head_dim;
        detail::normed_and_rotated<C, typename C::k_norm_t>(rotated, source, k_norm, cos, sin);
        write_head<C, typename C::k_scale_t>(pool, Half::keys, slots[row], head, rotated, a.k_scale.scalar());
        const T* values = a.v.row<const T>(row) + head * C::head_dim;
        [[maybe_unused]] T normed[C::head_dim];
        if constexpr (!std::is_same_v<typename C::v_norm_t, none>) {
          detail::normed_head<C, typename C::v_norm_t>(normed, values, v_norm);
          values = normed;
        }
        write_head<C, typename C::v_scale_t>(pool, Half::values, slots[row], head, values, a.v_scale.scalar());
      }
    }
  });
}

}  // namespace trtc
