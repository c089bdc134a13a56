// q_out = rope(q); pool[slots] = rope(layer_norm(k)): the first dimensions of each are rotated.
#pragma once

#include <cmath>

#include "cpu/context.hpp"
#include "cpu/paged_pool.hpp"
#include "cpu/rotary.hpp"

namespace trtc {

struct index_write_args {
  View q, k, positions, slots, cos, sin, norm, bias, pool, q_out, pool_out;
  std::int64_t M, num_pages;
};

namespace detail {

// out[0..width) = the key x, normalised and rounded to its type.
template <class C, class T>
void layer_normed(T* out, const T* x, const float* weight, const float* bias) {
  Floats total{};
  for_vectors(C::width, [&](std::int64_t i, auto n) { total = total + load(x + i, n); });
  const float mean = sum(total) / static_cast<float>(C::width);
  float centered[C::width];
  Floats squares{};
  for_vectors(C::width, [&](std::int64_t i, auto n) { store(centered + i, load(x + i, n) - mean, n); });
  for_vectors(C::width, [&](std::int64_t i, auto n) {
    const Floats value = load(centered + i, n);
    squares = fma(value, value, squares);
  });
  const float deviation = std::sqrt(sum(squares) / static_cast<float>(C::width) + C::eps);
  for_vectors(C::width, [&](std::int64_t i, auto n) {
    store(out + i, load(centered + i, n) / deviation * load(weight + i, n) + load(bias + i, n), n);
  });
}

}  // namespace detail

template <class C>
void index_write(Context& ctx, const index_write_args& a) {
  using T = typename C::q_t;
  static_assert(std::is_same_v<T, typename C::k_t> && C::planes == 1 && C::index_keys == 1);
  auto* pool = static_cast<typename C::pool_t*>(a.pool.data);
  const auto* positions = static_cast<const std::int32_t*>(a.positions.data);
  const auto* slots = static_cast<const std::int32_t*>(a.slots.data);
  const auto* norm = static_cast<const float*>(a.norm.data);
  const auto* bias = static_cast<const float*>(a.bias.data);

  ctx.threads.parallel_for(a.M, rows_a_part(C::num_heads * C::width), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* cos = a.cos.row<const float>(positions[row]);
      const float* sin = a.sin.row<const float>(positions[row]);
      T* out = a.q_out.row<T>(row);
      std::memcpy(out, a.q.row<const T>(row), sizeof(T) * C::num_heads * C::width);
      for (std::int64_t head = 0; head < C::num_heads; ++head) detail::rotate_head<C>(out + head * C::width, cos, sin);
      T key[C::width];
      detail::layer_normed<C>(key, a.k.row<const T>(row), norm, bias);
      detail::rotate_head<C>(key, cos, sin);
      write_to_pool<none>(pool + slots[row] * C::width, key, C::width, 1.f);
    }
  });
}

}  // namespace trtc
