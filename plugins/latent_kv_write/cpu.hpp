// q_out = (q[:nope], rope(q[nope:])) * q_scale; pool[slots] = (norm(c), rope(k)).
#pragma once

#include <cmath>

#include "cpu/context.hpp"
#include "cpu/paged_pool.hpp"

namespace trtc {

struct latent_kv_write_args {
  View q, kv, positions, slots, cos, sin, norm, pool, q_scale, q_out, pool_out;
  std::int64_t M, num_pages;
};

namespace detail {

// out = x with its pairs (i, i + rotary_half) rotated.
template <class C, class T>
void rotate_pairs(T* out, const T* x, const float* cos, const float* sin) {
  for_vectors(C::rotary_half, [&](std::int64_t i, auto n) {
    const Floats c = load(cos + i, n), s = load(sin + i, n);
    const Floats first = load(x + i, n), second = load(x + C::rotary_half + i, n);
    store(out + i, first * c - second * s, n);
    store(out + C::rotary_half + i, second * c + first * s, n);
  });
}

// out[0..rank) = the latent x, normalised and rounded to its type.
template <class C, class T>
void normed_latent(T* out, const T* x, const float* weight) {
  Floats squares{};
  for_vectors(C::rank, [&](std::int64_t i, auto n) {
    const Floats value = load(x + i, n);
    squares = fma(value, value, squares);
  });
  const float rms = std::sqrt(sum(squares) / static_cast<float>(C::rank) + C::eps);
  for_vectors(C::rank, [&](std::int64_t i, auto n) { store(out + i, load(x + i, n) / rms * load(weight + i, n), n); });
}

}  // namespace detail

template <class C>
void latent_kv_write(Context& ctx, const latent_kv_write_args& a) {
  using T = typename C::q_t;
  constexpr std::int64_t nope = C::head_dim - 2 * C::rotary_half;
  static_assert(std::is_same_v<T, typename C::kv_t> && C::width == C::rank + 2 * C::rotary_half && nope >= 0);
  auto* pool = static_cast<typename C::pool_t*>(a.pool.data);
  const auto* positions = static_cast<const std::int32_t*>(a.positions.data);
  const auto* slots = static_cast<const std::int32_t*>(a.slots.data);
  const auto* norm = static_cast<const float*>(a.norm.data);

  ctx.threads.parallel_for(a.M, rows_a_part(C::num_heads * C::head_dim), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* cos = a.cos.row<const float>(positions[row]);
      const float* sin = a.sin.row<const float>(positions[row]);
      for (std::int64_t head = 0; head < C::num_heads; ++head) {
        const T* q = a.q.row<const T>(row) + head * C::head_dim;
        T* out = a.q_out.row<T>(row) + head * C::head_dim;
        std::memcpy(out, q, sizeof(T) * nope);
        detail::rotate_pairs<C>(out + nope, q + nope, cos, sin);
        if constexpr (!std::is_same_v<typename C::q_scale_t, none>) {
          const float scale = static_cast<const float*>(a.q_scale.data)[positions[row]];
          for_vectors(C::head_dim, [&](std::int64_t i, auto n) { store(out + i, load(out + i, n) * scale, n); });
        }
      }
      T latent[C::width];
      const T* kv = a.kv.row<const T>(row);
      detail::normed_latent<C>(latent, kv, norm);
      detail::rotate_pairs<C>(latent + C::rank, kv + C::rank, cos, sin);
      write_to_pool<none>(pool + slots[row] * C::width, latent, C::width, 1.f);
    }
  });
}

}  // namespace trtc
