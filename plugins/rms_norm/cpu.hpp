// total = x + residual; normed = norm(total) * weight + bias; out = quantize(normed).
#pragma once

#include <cmath>

#include "cpu/context.hpp"
#include "cpu/quantizer.hpp"

namespace trtc {

struct rms_norm_args {
  View x, residual, weight, bias, pre_scale, out_scale, out, total, row_scale, normed;
  std::int64_t M;
};

namespace detail {

// x in the lanes that are in memory, 0 in the others.
inline Floats in_memory(Floats x, AllLanes) { return x; }
inline Floats in_memory(Floats x, int n) { return lane_numbers() < static_cast<float>(n) ? x : Floats{}; }

}  // namespace detail

template <class C>
void rms_norm(Context& ctx, const rms_norm_args& a) {
  using T = typename C::x_t;
  using Out = typename C::out_t;
  constexpr bool has_residual = !std::is_same_v<typename C::residual_t, none>;
  constexpr bool has_total = !std::is_same_v<typename C::total_t, none>;
  static_assert(C::scales == 0, "a quantize after it gives rows their scales");
  static_assert(has_residual || !has_total, "total is the sum with the residual");
  const Quantizer<T, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a.pre_scale, a.out_scale);
  constexpr bool has_normed = !std::is_same_v<typename C::normed_t, none>;
  constexpr bool has_bias = !std::is_same_v<typename C::bias_t, none>;
  const auto* weight = static_cast<const float*>(a.weight.data);
  [[maybe_unused]] const auto* bias = static_cast<const float*>(a.bias.data);

  ctx.threads.parallel_for(a.M, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* x = a.x.row<const T>(row);
      const auto total = [&](std::int64_t i, auto n) {
        if constexpr (has_residual) {
          const auto* residual = a.residual.row<const typename C::residual_t>(row);
          return rounded<T>(load(x + i, n) + load(residual + i, n));
        } else {
          return load(x + i, n);
        }
      };
      [[maybe_unused]] float mean = 0.f;
      if constexpr (C::centered != 0) {
        Floats parts{};
        for_vectors(C::K, [&](std::int64_t i, auto n) { parts = parts + total(i, n); });
        mean = sum(parts) / static_cast<float>(C::K);
      }
      const auto centered = [&](Floats value, auto n) {
        if constexpr (C::centered != 0) {
          return detail::in_memory(value - mean, n);
        } else {
          return value;
        }
      };
      Floats squares{};
      for_vectors(C::K, [&](std::int64_t i, auto n) {
        const Floats value = total(i, n);
        if constexpr (has_total) store(a.total.row<typename C::total_t>(row) + i, value, n);
        const Floats off = centered(value, n);
        squares = fma(off, off, squares);
      });
      const float scale = 1.f / std::sqrt(sum(squares) / static_cast<float>(C::K) + C::eps);
      auto* out = a.out.row<Out>(row);
      for_vectors(C::K, [&](std::int64_t i, auto n) {
        Floats normed = centered(total(i, n), n) * scale * load(weight + i, n);
        if constexpr (has_bias) normed = normed + load(bias + i, n);
        if constexpr (has_normed) store(a.normed.row<typename C::normed_t>(row) + i, normed, n);
        quantizer.store(out + i, i, normed, n);
      });
    }
  });
}

}  // namespace trtc
