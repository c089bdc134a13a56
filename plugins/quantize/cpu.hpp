// out = quantize(x * pre_scale / scale), where the scale is out_scale or follows from each row of x.
#pragma once

#include <type_traits>

#include "cpu/context.hpp"
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
  for (std::int64_t group = 0; group < C::scales; ++group) {
    const std::int64_t first = group * width;
    Floats lanes{};
    for_vectors(width, [&](std::int64_t i, auto n) {
      lanes = max(lanes, as_floats(bits_of(value(first + i, n)) & 0x7fffffffu));
    });
    const float amax = largest(lanes);
    const float scale = (amax > kLeastMagnitude ? amax : kLeastMagnitude) / kLargestCode<Code>;
    if constexpr (!std::is_same_v<typename C::row_scale_t, none>) a.row_scale.row<float>(row)[group] = scale;
    for_vectors(width, [&](std::int64_t i, auto n) {
      Floats code = value(first + i, n) / scale;
      if constexpr (dequantizes) code = rounded<Code>(code) * scale;
      store(out + first + i, code, n);
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
