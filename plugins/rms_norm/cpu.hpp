// total = x + residual; out = quantize(rms_norm(total) * weight).
#pragma once

#include <cmath>

#include "cpu/context.hpp"
#include "cpu/quantizer.hpp"

namespace trtc {

struct rms_norm_args {
  View x, residual, weight, pre_scale, out_scale, out, total;
  std::int64_t M;
};

template <class C>
void rms_norm(Context& ctx, const rms_norm_args& a) {
  using T = typename C::x_t;
  using Out = typename C::out_t;
  constexpr bool has_residual = !std::is_same_v<typename C::residual_t, none>;
  constexpr bool has_total = !std::is_same_v<typename C::total_t, none>;
  static_assert(has_residual || !has_total, "total is the sum with the residual");
  const Quantizer<T, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a.pre_scale, a.out_scale);
  const auto* weight = static_cast<const float*>(a.weight.data);

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
      Floats squares{};
      for_vectors(C::K, [&](std::int64_t i, auto n) {
        const Floats value = total(i, n);
        if constexpr (has_total) store(a.total.row<typename C::total_t>(row) + i, value, n);
        squares = fma(value, value, squares);
      });
      const float scale = 1.f / std::sqrt(sum(squares) / static_cast<float>(C::K) + C::eps);
      auto* out = a.out.row<Out>(row);
      for_vectors(C::K, [&](std::int64_t i, auto n) {
        quantizer.store(out + i, i, total(i, n) * scale * load(weight + i, n), n);
      });
    }
  });
}

}  // namespace trtc
