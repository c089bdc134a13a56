// out = quantize(activation(gate) * up), or quantize(activation(gate)).
#pragma once

#include "cpu/activation.hpp"
#include "cpu/context.hpp"
#include "cpu/quantizer.hpp"

namespace trtc {

struct swiglu_args {
  View gate, up, pre_scale, out_scale, out, row_scale;
  std::int64_t M;
};

template <class C>
void swiglu(Context& ctx, const swiglu_args& a) {
  using T = typename C::gate_t;
  using Out = typename C::out_t;
  constexpr std::int64_t kColumns = 512;  // an exponential costs about four other elements
  constexpr std::int64_t parts = (C::I + kColumns - 1) / kColumns;
  static_assert(C::scales == 0, "a quantize after it gives rows their scales");
  const Quantizer<T, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a.pre_scale, a.out_scale);
  ctx.threads.parallel_for(a.M * parts, rows_a_part(4 * kColumns), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t row = part / parts;
      const std::int64_t first = part % parts * kColumns;
      const auto* gate = a.gate.row<const T>(row) + first;
      auto* out = a.out.row<Out>(row) + first;
      const std::int64_t columns = C::I - first < kColumns ? C::I - first : kColumns;
      for_vectors(columns, [&](std::int64_t i, auto n) {
        const Floats value = rounded<T>(activated<C::activation>(load(gate + i, n)));
        if constexpr (std::is_same_v<typename C::up_t, none>) {
          quantizer.store(out + i, first + i, value, n);
        } else {
          const auto* up = a.up.row<const typename C::up_t>(row) + first;
          quantizer.store(out + i, first + i, value * load(up + i, n), n);
        }
      });
    }
  });
}

}  // namespace trtc
