// out = x[rows].
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/types.hpp"

namespace trtc {

struct gather_rows_args {
  View x, rows, out;
  std::int64_t M, R;
};

template <class C>
void gather_rows(Context& ctx, const gather_rows_args& a) {
  using T = typename C::x_t;
  static_assert(std::is_same_v<T, typename C::out_t>);
  const auto* rows = static_cast<const std::int32_t*>(a.rows.data);
  ctx.threads.parallel_for(a.R, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::memcpy(a.out.row<T>(row), a.x.row<const T>(rows[row]), sizeof(T) * C::K);
    }
  });
}

}  // namespace trtc
