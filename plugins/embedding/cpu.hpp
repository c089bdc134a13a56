// out = (table * table_scale)[token_ids] * scale.
#pragma once

#include "cpu/context.hpp"
#include "cpu/gemm_format.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct embedding_args {
  View token_ids, table, table_scale, out;
  std::int64_t M;
};

namespace detail {

// The int8 of column i of a panel's column, from the panel's first block on (plugins/layouts.py).
template <class C>
int panel_code(const std::uint8_t* panel, std::int64_t column, std::int64_t i) {
  constexpr std::int64_t kPlane = C::V * C::H / 2;
  constexpr int kDepth = C::layout == Layout::planes ? 8 : 4;  // of a block
  const std::uint8_t* cell = panel + i / kDepth * gemm::kBlockBytes + column * 4 + gemm::kByteOrder[i % 4];
  if constexpr (C::layout == Layout::planes) {
    const auto code = [&](const std::uint8_t* plane) { return (*plane >> (i % 8 / 4 * 4) & 15) - 8; };
    return 16 * code(cell) + code(cell + kPlane);
  }
  return *cell - 128;
}

// Row `id` of an int8 table as floats.
template <class C>
void widen_table_row(const embedding_args& a, std::int64_t id, float* out) {
  constexpr bool kPacked = C::layout != Layout::row_major;
  constexpr std::int64_t kGroups = gemm::ceil_div(C::H, C::group_size);
  constexpr bool kPlanes = C::layout == Layout::planes;
  constexpr std::int64_t kPanelBytes = gemm::kPanel * C::H / (kPlanes ? 2 : 1);
  static_assert(!kPacked || (C::V % gemm::kPanel == 0 && C::H % (kPlanes ? 8 : 4) == 0), "whole blocks");
  const std::int64_t panel = id / gemm::kPanel, column = id % gemm::kPanel;
  const float* scale = a.table_scale.row<const float>(0) +
                       (kPacked ? panel * gemm::kPanel * kGroups + column : id * kGroups);
  const auto* bytes = static_cast<const std::uint8_t*>(a.table.data);
  for (std::int64_t i = 0; i < C::H; ++i) {
    const float factor = scale[i / C::group_size * (kPacked ? gemm::kPanel : 1)];
    if constexpr (kPacked) {
      out[i] = static_cast<float>(panel_code<C>(bytes + panel * kPanelBytes, column, i)) * factor;
    } else {
      out[i] = static_cast<float>(static_cast<std::int8_t>(bytes[id * C::H + i])) * factor;
    }
  }
}

}  // namespace detail

template <class C>
void embedding(Context& ctx, const embedding_args& a) {
  using Out = typename C::out_t;
  constexpr bool kNarrow = !std::is_same_v<typename C::table_scale_t, none>;
  const auto* token_ids = static_cast<const std::int32_t*>(a.token_ids.data);
  const Floats scale = rounded<Out>(broadcast(C::scale));
  ctx.threads.parallel_for(a.M, rows_a_part(C::H), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      auto* out = a.out.row<Out>(row);
      const auto put = [&](const auto* from) {
        for_vectors(C::H, [&](std::int64_t i, auto n) { store(out + i, rounded<Out>(load(from + i, n)) * scale, n); });
      };
      if constexpr (kNarrow) {
        float values[C::H];
        detail::widen_table_row<C>(a, token_ids[row], values);
        put(values);
      } else {
        put(a.table.row<const typename C::table_t>(token_ids[row]));
      }
    }
  });
}

}  // namespace trtc
