// out = x + y.
#pragma once

#include "cpu/context.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct add_args {
  View x, y, out;
  std::int64_t M;
};

template <class C>
void add(Context& ctx, const add_args& a) {
  ctx.threads.parallel_for(a.M, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* x = a.x.row<const typename C::x_t>(row);
      const auto* y = a.y.row<const typename C::y_t>(row);
      auto* out = a.out.row<typename C::out_t>(row);
      for_vectors(C::K, [&](std::int64_t i, auto n) { store(out + i, load(x + i, n) + load(y + i, n), n); });
    }
  });
}

}  // namespace trtc
