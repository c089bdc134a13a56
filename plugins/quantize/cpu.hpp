// out = quantize(x * pre_scale / out_scale).
#pragma once

#include "cpu/context.hpp"
#include "cpu/quantizer.hpp"

namespace trtc {

struct quantize_args {
  View x, pre_scale, out_scale, out;
  std::int64_t M;
};

template <class C>
void quantize(Context& ctx, const quantize_args& a) {
  using T = typename C::x_t;
  using Out = typename C::out_t;
  const Quantizer<T, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a.pre_scale, a.out_scale);
  ctx.threads.parallel_for(a.M, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* x = a.x.row<const T>(row);
      auto* out = a.out.row<Out>(row);
      for_vectors(C::K, [&](std::int64_t i, auto n) { quantizer.store(out + i, i, load(x + i, n), n); });
    }
  });
}

}  // namespace trtc
