// out = (x + y) * factor.
#pragma once

#include "cpu/context.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct add_args {
  View x, y, factor, out;
  std::int64_t M;
};

template <class C>
void add(Context& ctx, const add_args& a) {
  using Out = typename C::out_t;
  [[maybe_unused]] const Floats factor = broadcast(a.factor.scalar());
  ctx.threads.parallel_for(a.M, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* x = a.x.row<const typename C::x_t>(row);
      const auto* y = a.y.row<const typename C::y_t>(row);
      auto* out = a.out.row<Out>(row);
      for_vectors(C::K, [&](std::int64_t i, auto n) {
        Floats total = load(x + i, n) + load(y + i, n);
        if constexpr (!std::is_same_v<typename C::factor_t, none>) total = rounded<Out>(total) * factor;
        store(out + i, total, n);
      });
    }
  });
}

}  // namespace trtc
