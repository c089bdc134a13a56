// out = quantize(x * pre_scale / scale), where the scale is out_scale or follows from each row of x.
#pragma once

#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/hadamard.hpp"
#include "cpu/quantizer.hpp"

namespace trtc {

struct quantize_args {
  View x, pre_scale, out_scale, out, row_scale;
  std::int64_t M;
};

namespace detail {

// Codes of a row by the largest magnitude of each group; what they stand for, where C::codes says so.
template <class C>
void quantize_row(const quantize_args& a, std::int64_t row) {
  using T = typename C::x_t;
  using Out = typename C::out_t;
  constexpr bool dequantizes = C::codes != ActQuant::none;
  using Code = std::conditional_t<dequantizes, f8e4m3, Out>;
  static_assert(C::K % C::scales == 0, "groups are whole");
  constexpr std::int64_t width = C::K / C::scales;
  const auto* x = a.x.row<const T>(row);
  auto* out = a.out.row<Out>(row);
  const auto value = [&](std::int64_t i, auto n) {
    Floats one = load(x + i, n);
    if constexpr (!std::is_same_v<typename C::pre_scale_t, none>) {
      one = rounded<T>(one * load(a.pre_scale.row<const float>(0) + i, n));
    }
    return one;
  };
  // Calls body(column, values, n) for the columns from `first` on that share a scale. Blocks are multiplied anew
  // for each call: that is a few additions, and there is no row to keep.
  const auto for_group = [&](std::int64_t first, auto&& body) {
    if constexpr (C::hadamard == 0) {
      for_vectors(width, [&](std::int64_t i, auto n) { body(first + i, value(first + i, n), n); });
    } else {
      static_assert(width % C::hadamard == 0, "blocks are whole");
      alignas(64) float block[C::hadamard];
      for (std::int64_t begin = first; begin < first + width; begin += C::hadamard) {
        for_vectors(C::hadamard, [&](std::int64_t i, auto n) { store(block + i, value(begin + i, n), n); });
        hadamard<C::hadamard, C::hadamard>(block);
        for_vectors(C::hadamard, [&](std::int64_t i, auto n) { body(begin + i, load(block + i, n), n); });
      }
    }
  };
  for (std::int64_t group = 0; group < C::scales; ++group) {
    const std::int64_t first = group * width;
    Floats lanes{};
    for_group(first, [&](std::int64_t, Floats x, auto) { lanes = max(lanes, as_floats(bits_of(x) & 0x7fffffffu)); });
    const float amax = largest(lanes);
    const float scale = (amax > kLeastMagnitude ? amax : kLeastMagnitude) / kLargestCode<Code>;
    if constexpr (!std::is_same_v<typename C::row_scale_t, none>) a.row_scale.row<float>(row)[group] = scale;
    for_group(first, [&](std::int64_t column, Floats x, auto n) {
      Floats code = x / scale;
      if constexpr (dequantizes) code = rounded<Code>(code) * scale;
      store(out + column, code, n);
    });
  }
}

}  // namespace detail

template <class C>
void quantize(Context& ctx, const quantize_args& a) {
  using T = typename C::x_t;
  using Out = typename C::out_t;
  const Quantizer<T, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a.pre_scale, a.out_scale);
  ctx.threads.parallel_for(a.M, rows_a_part(C::K), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t row = begin; row < end; ++row) {
      if constexpr (C::scales > 0) {
        detail::quantize_row<C>(a, row);
      } else {
        const auto* x = a.x.row<const T>(row);
        auto* out = a.out.row<Out>(row);
        for_vectors(C::K, [&](std::int64_t i, auto n) { quantizer.store(out + i, i, load(x + i, n), n); });
      }
    }
  });
}

}  // namespace trtc
