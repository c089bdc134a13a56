// out = (table * table_scale)[token_ids] * scale.
#pragma once

#include <bit>
#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/gemm_format.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct embedding_args {
  View token_ids, table, table_scale, scale_unit, out;
  std::int64_t M;
};

namespace detail {

// Of a table of codes of plugins/iq4.py; others of codes are int8.
template <class C>
constexpr bool kIsIq4 = std::is_same_v<typename C::table_t, u4x2>;

// Of a panel's column, number i from the panel's first block on (plugins/layouts.py).
template <class C>
int panel_number(const std::uint8_t* panel, std::int64_t column, std::int64_t i) {
  constexpr std::int64_t kPlane = C::V * C::H / 2;
  constexpr bool kPlanes = C::layout == Layout::planes;
  constexpr int kDepth = kPlanes || kIsIq4<C> ? 8 : 4;  // of a block
  const std::uint8_t* cell = panel + i / kDepth * gemm::kBlockBytes + column * 4 + gemm::kByteOrder[i % 4];
  const auto nibble = [&](const std::uint8_t* plane) { return *plane >> (i % 8 / 4 * 4) & 15; };
  if constexpr (kIsIq4<C>) return gemm::kIq4Values[nibble(cell)];
  if constexpr (kPlanes) return 16 * (nibble(cell) - 8) + nibble(cell + kPlane) - 8;
  return *cell - 128;
}

// Number i of a row-major table.
template <class C>
int number_at(const std::uint8_t* bytes, std::int64_t i) {
  if constexpr (kIsIq4<C>) return gemm::kIq4Values[bytes[i / 2] >> (i % 2 * 4) & 15];
  return static_cast<std::int8_t>(bytes[i]);
}

// A scale, without the unit that bytes have.
inline float scale_number(float scale) { return scale; }
inline float scale_number(std::uint8_t byte) {
  return std::bit_cast<float>((byte & 0x80u) << 24 | (byte & 0x7fu) << 19 | 120u << 23);
}

// Row `id` of a table of codes as floats.
template <class C>
void widen_table_row(const embedding_args& a, std::int64_t id, float* out) {
  using Scale = typename C::table_scale_t;
  constexpr bool kPacked = C::layout != Layout::row_major;
  constexpr std::int64_t kGroups = gemm::ceil_div(C::H, C::group_size);
  constexpr bool kHalves = C::layout == Layout::planes || kIsIq4<C>;
  constexpr std::int64_t kPanelBytes = gemm::kPanel * C::H / (kHalves ? 2 : 1);
  static_assert(!kPacked || (C::V % gemm::kPanel == 0 && C::H % (kHalves ? 8 : 4) == 0), "whole blocks");
  const std::int64_t panel = id / gemm::kPanel, column = id % gemm::kPanel;
  const Scale* scale = a.table_scale.row<const Scale>(0) +
                       (kPacked ? panel * gemm::kPanel * kGroups + column : id * kGroups);
  float unit = 1.f;
  if constexpr (std::is_same_v<Scale, std::uint8_t>) unit = a.scale_unit.row<const float>(0)[id];
  const auto* bytes = static_cast<const std::uint8_t*>(a.table.data);
  for (std::int64_t i = 0; i < C::H; ++i) {
    const float factor = unit * scale_number(scale[i / C::group_size * (kPacked ? gemm::kPanel : 1)]);
    const int number =
        kPacked ? panel_number<C>(bytes + panel * kPanelBytes, column, i) : number_at<C>(bytes, id * C::H + i);
    out[i] = static_cast<float>(number) * factor;
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
