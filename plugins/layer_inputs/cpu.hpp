// out = (norm(projected) + table[token_ids] * table_scale) * scale, with a norm of every `width` columns.
#pragma once

#include <cmath>

#include "cpu/context.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct layer_inputs_args {
  View projected, token_ids, table, norm, out;
  std::int64_t M;
};

template <class C>
void layer_inputs(Context& ctx, const layer_inputs_args& a) {
  using T = typename C::projected_t;
  static_assert(std::is_same_v<T, typename C::out_t> && C::K % C::width == 0);
  const auto* token_ids = static_cast<const std::int32_t*>(a.token_ids.data);
  const auto* norm = static_cast<const float*>(a.norm.data);

  ctx.threads.parallel_for(a.M, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* entry = a.table.row<const typename C::table_t>(token_ids[row]);
      const T* in = a.projected.row<const T>(row);
      T* out = a.out.row<T>(row);
      for (std::int64_t first = 0; first < C::K; first += C::width) {
        Floats squares{};
        for_vectors(C::width, [&](std::int64_t i, auto n) {
          const Floats value = load(in + first + i, n);
          squares = fma(value, value, squares);
        });
        const float rms = std::sqrt(sum(squares) / static_cast<float>(C::width) + C::eps);
        for_vectors(C::width, [&](std::int64_t i, auto n) {
          const Floats normed = rounded<T>(load(in + first + i, n) / rms * load(norm + i, n));
          const Floats looked_up = rounded<T>(load(entry + first + i, n) * C::table_scale);
          store(out + first + i, rounded<T>(normed + looked_up) * C::scale, n);
        });
      }
    }
  });
}

}  // namespace trtc
