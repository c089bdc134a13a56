// out[head] = (weight[head] @ x[head][:K], x[head][K:]).
//
// A thread takes some rows of a head's matrix through all rows of x, so that weights are read once.
// Each product is one chain of multiply-adds over K in vectors, whatever the tile it is in.
#pragma once

#include "cpu/context.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct head_linear_args {
  View x, weight, out;
  std::int64_t M;
};

namespace detail {

template <class C, int kRows, int kColumns, class X, class Weight, class Out>
void head_tile(const X* const* x, const Weight* weight, Out* const* out) {
  Floats sums[kRows][kColumns] = {};
  for_vectors(C::K, [&](std::int64_t k, auto n) {
    Floats w[kColumns];
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) w[j] = load(weight + j * C::K + k, n);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats value = load(x[i] + k, n);
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) sums[i][j] = fma(value, w[j], sums[i][j]);
    }
  });
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) out[i][j] = from_float<Out>(sum(sums[i][j]));
  }
}

}  // namespace detail

template <class C>
void head_linear(Context& ctx, const head_linear_args& a) {
  using X = typename C::x_t;
  using Weight = typename C::weight_t;
  using Out = typename C::out_t;
  static_assert(C::in_dim - C::K == C::out_dim - C::N, "what is behind K passes unchanged");
  constexpr std::int64_t rest = C::in_dim - C::K;
  constexpr std::int64_t kBlock = 32;  // rows of a matrix that a thread takes at a time
  constexpr std::int64_t blocks = (C::N + kBlock - 1) / kBlock;
  constexpr int kRows = 4, kColumns = 4;
  const auto* weights = static_cast<const Weight*>(a.weight.data);
  const std::int64_t grain = rows_a_part(a.M * kBlock * C::K / 16 + 1);
  ctx.threads.parallel_for(C::num_heads * blocks, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t head = part / blocks, first = part % blocks * kBlock;
      const std::int64_t last = first + kBlock < C::N ? first + kBlock : C::N;
      const Weight* weight = weights + head * C::N * C::K;
      const auto rows = [&]<int n>(std::int64_t row) {
        const X* x[n];
        Out* out[n];
        for (int i = 0; i < n; ++i) {
          x[i] = a.x.row<const X>(row + i) + head * C::in_dim;
          out[i] = a.out.row<Out>(row + i) + head * C::out_dim;
          if (first == 0 && rest > 0) std::memcpy(out[i] + C::N, x[i] + C::K, sizeof(X) * rest);
          out[i] += first;
        }
        std::int64_t column = first;
        for (; column + kColumns <= last; column += kColumns) {
          detail::head_tile<C, n, kColumns>(x, weight + column * C::K, out);
          for (int i = 0; i < n; ++i) out[i] += kColumns;
        }
        if constexpr (C::N % kColumns != 0) {
          for (; column < last; ++column) {
            detail::head_tile<C, n, 1>(x, weight + column * C::K, out);
            for (int i = 0; i < n; ++i) ++out[i];
          }
        }
      };
      std::int64_t row = 0;
      for (; row + kRows <= a.M; row += kRows) rows.template operator()<kRows>(row);
      for (; row < a.M; ++row) rows.template operator()<1>(row);
    }
  });
}

}  // namespace trtc
