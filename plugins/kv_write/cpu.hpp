// pool[slots] = (k / k_scale, v / v_scale).
#pragma once

#include "cpu/context.hpp"
#include "cpu/paged_pool.hpp"

namespace trtc {

struct kv_write_args {
  View k, v, pool, slots, k_scale, v_scale, pool_out;
  std::int64_t M, num_pages;
};

template <class C>
void kv_write(Context& ctx, const kv_write_args& a) {
  constexpr std::int64_t token = C::num_kv_heads * C::head_dim;
  auto* pool = static_cast<typename C::pool_t*>(a.pool.data);
  const auto* slots = static_cast<const std::int32_t*>(a.slots.data);
  ctx.threads.parallel_for(a.M, rows_a_part(2 * token), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      write_to_pool<typename C::k_scale_t>(slot_in_pool<C>(pool, Half::keys, slots[row]),
                                           a.k.row<const typename C::k_t>(row), token, a.k_scale.scalar());
      write_to_pool<typename C::v_scale_t>(slot_in_pool<C>(pool, Half::values, slots[row]),
                                           a.v.row<const typename C::v_t>(row), token, a.v_scale.scalar());
    }
  });
}

}  // namespace trtc
