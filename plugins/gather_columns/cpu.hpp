// out = x[:, columns].
#pragma once

#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/types.hpp"

namespace trtc {

struct gather_columns_args {
  View x, columns, out;
  std::int64_t M;
};

template <class C>
void gather_columns(Context& ctx, const gather_columns_args& a) {
  using T = typename C::x_t;
  static_assert(std::is_same_v<T, typename C::out_t>);
  const auto* columns = static_cast<const std::int32_t*>(a.columns.data);
  ctx.threads.parallel_for(a.M, rows_a_part(C::N), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* x = a.x.row<const T>(row);
      auto* out = a.out.row<T>(row);
      for (std::int64_t i = 0; i < C::N; ++i) out[i] = x[columns[i]];
    }
  });
}

}  // namespace trtc
