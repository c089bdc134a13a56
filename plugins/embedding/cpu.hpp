// out = table[token_ids] * scale.
#pragma once

#include "cpu/context.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct embedding_args {
  View token_ids, table, out;
  std::int64_t M;
};

template <class C>
void embedding(Context& ctx, const embedding_args& a) {
  using Out = typename C::out_t;
  const auto* token_ids = static_cast<const std::int32_t*>(a.token_ids.data);
  const Floats scale = rounded<Out>(broadcast(C::scale));
  ctx.threads.parallel_for(a.M, rows_a_part(C::H), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto* from = a.table.row<const typename C::table_t>(token_ids[row]);
      auto* out = a.out.row<Out>(row);
      for_vectors(C::H, [&](std::int64_t i, auto n) { store(out + i, rounded<Out>(load(from + i, n)) * scale, n); });
    }
  });
}

}  // namespace trtc
