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

// Where a table of codes lies in panels (plugins/layouts.py).
template <class C>
struct TablePanels {
  static constexpr bool kPlanes = C::layout == Layout::planes;
  static constexpr int kBlockDepth = kPlanes ? 8 : gemm::block_depth(C::weight_dtype);
  static constexpr int kBlockBytes = (C::weight_dtype == DType::i6 ? 3 : 1) * gemm::kBlockBytes;
  static constexpr std::int64_t kBytes = gemm::ceil_div(C::H, kBlockDepth) * kBlockBytes;  // of each
  static constexpr std::int64_t kPlaneBytes = gemm::ceil_div(C::V, gemm::kPanel) * kBytes;
};

// Of a panel's column, number i.
template <class C>
int panel_number(const std::uint8_t* panel, std::int64_t column, std::int64_t i) {
  using P = TablePanels<C>;
  const std::uint8_t* cell = panel + i / P::kBlockDepth * P::kBlockBytes + column * 4 + gemm::kByteOrder[i % 4];
  const auto nibble = [&](const std::uint8_t* plane) { return *plane >> (i % 8 / 4 * 4) & 15; };
  if constexpr (C::weight_dtype == DType::iq4) return gemm::kIq4Values[nibble(cell)];
  if constexpr (C::weight_dtype == DType::i6) {
    const int high = cell[2 * gemm::kBlockBytes] >> (i % 16 / 4 * 2) & 3;
    return (high << 4 | nibble(cell + i % 16 / 8 * gemm::kBlockBytes)) - gemm::kSixOffset;
  }
  if constexpr (P::kPlanes) return 16 * (nibble(cell) - 8) + nibble(cell + P::kPlaneBytes) - 8;
  return *cell - 128;
}

// Number i of a row-major table.
template <class C>
int number_at(const std::uint8_t* bytes, std::int64_t i) {
  if constexpr (C::weight_dtype == DType::iq4) return gemm::kIq4Values[bytes[i / 2] >> (i % 2 * 4) & 15];
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
  const std::int64_t panel = id / gemm::kPanel, column = id % gemm::kPanel, first = panel * gemm::kPanel;
  const std::int64_t columns = C::V - first < gemm::kPanel ? C::V - first : gemm::kPanel;
  const Scale* scale = a.table_scale.row<const Scale>(0) + (kPacked ? first * kGroups + column : id * kGroups);
  float unit = 1.f;
  if constexpr (std::is_same_v<Scale, std::uint8_t>) unit = a.scale_unit.row<const float>(0)[id];
  const auto* bytes = static_cast<const std::uint8_t*>(a.table.data);
  for (std::int64_t i = 0; i < C::H; ++i) {
    const float factor = unit * scale_number(scale[i / C::group_size * (kPacked ? columns : 1)]);
    const int number = kPacked ? panel_number<C>(bytes + panel * TablePanels<C>::kBytes, column, i)
                               : number_at<C>(bytes, id * C::H + i);
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
