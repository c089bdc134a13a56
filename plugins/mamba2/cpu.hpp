// The recurrence of Mamba-2 over the rows of each sequence, head by head; then the gated norm of each
// group of heads.
#pragma once

#include <cmath>
#include <type_traits>

#include "cpu/activation.hpp"
#include "cpu/context.hpp"
#include "cpu/recurrence.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct mamba2_args {
  View xbc, z, dt, state, query_start, context_lens, page_table, slots, rate, dt_bias, skip, norm, out, state_out, squares;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

template <class C>
struct SsmHead {
  using T = typename C::xbc_t;
  static constexpr std::int64_t kDim = C::head_dim, kState = C::state_size;
  static constexpr std::int64_t kWidth = C::heads * kDim;
  const mamba2_args& a;
  std::int64_t head;
  float* found;  // [M, heads * head_dim]
  alignas(64) float b[kState], c[kState];

  float* state_in(std::int32_t page) const { return a.state.row<float>(page) + head * kState * kDim; }
  static void clear(float* state) { std::fill_n(state, kState * kDim, 0.f); }

  // What softplus makes of a row's dt, within the limits.
  float step(std::int64_t number) const {
    const float x = to_float(a.dt.row<const typename C::dt_t>(number)[head]) + a.dt_bias.row<const float>(0)[head];
    float step = x > 20.f ? x : std::log1p(std::exp(x));
    if constexpr (C::dt_min != 0) step = step < static_cast<float>(C::dt_min) ? static_cast<float>(C::dt_min) : step;
    if constexpr (C::dt_max != 0) step = step > static_cast<float>(C::dt_max) ? static_cast<float>(C::dt_max) : step;
    return step;
  }

  // `kVectors` neighbours of one row of the matrix, for all rows.
  template <int kVectors, class N>
  void columns(std::int64_t first, const T* x, const float* from, float* to, float* y, float decay, float step, N n) {
    constexpr std::int64_t kStep = kLanes;
    const float skip = a.skip.row<const float>(0)[head];
    Floats added[kVectors], result[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      const Floats value = load(x + first + j * kStep, n);
      added[j] = step * value;
      result[j] = skip * value;
    }
    for (std::int64_t i = 0; i < kState; ++i) {
      const Floats key = broadcast(b[i]), query = broadcast(c[i]);
      for (int j = 0; j < kVectors; ++j) {
        const std::int64_t at = i * kDim + first + j * kStep;
        const Floats value = fma(key, added[j], decay * load(from + at, n));
        store(to + at, value, n);
        result[j] = fma(value, query, result[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) store(y + first + j * kStep, result[j], n);
  }

  void row(std::int64_t number, const float* from, float* to) {
    const T* of_row = a.xbc.row<const T>(number);
    const T* of_group = of_row + kWidth + head / (C::heads / C::groups) * kState;
    for_vectors(kState, [&](std::int64_t i, auto n) {
      store(b + i, load(of_group + i, n), n);
      store(c + i, load(of_group + C::groups * kState + i, n), n);
    });
    const T* x = of_row + head * kDim;
    float* y = found + number * kWidth + head * kDim;
    const float time = step(number), decay = std::exp(a.rate.row<const float>(0)[head] * time);
    constexpr std::int64_t kWide = 4 * kLanes, kWhole = kDim / kWide * kWide;
    for (std::int64_t j = 0; j < kWhole; j += kWide) columns<4>(j, x, from, to, y, decay, time, AllLanes{});
    for_vectors(kDim - kWhole, [&](std::int64_t j, auto n) {
      columns<1>(kWhole + j, x, from, to, y, decay, time, n);
    });
  }
};

// rms_norm(found * silu(z)) * norm of one group of a row.
template <class C>
void ssm_norm(const mamba2_args& a, float* found, std::int64_t row, std::int64_t group) {
  constexpr std::int64_t kWidth = C::heads * C::head_dim, kGroup = kWidth / C::groups;
  float* y = found + row * kWidth + group * kGroup;
  const auto* z = a.z.row<const typename C::z_t>(row) + group * kGroup;
  Floats squares{};
  for_vectors(kGroup, [&](std::int64_t i, auto n) {
    const Floats gated = load(y + i, n) * activated<Activation::silu>(load(z + i, n));
    // Lanes beyond a partial vector are silu(0) * 0.
    squares = fma(gated, gated, squares);
    store(y + i, gated, n);
  });
  const float by = 1.f / std::sqrt(sum(squares) / static_cast<float>(kGroup) + C::eps);
  const float* norm = a.norm.row<const float>(0) + group * kGroup;
  auto* out = a.out.row<typename C::out_t>(row) + group * kGroup;
  for_vectors(kGroup, [&](std::int64_t i, auto n) { store(out + i, load(y + i, n) * by * load(norm + i, n), n); });
}

}  // namespace detail

template <class C>
std::size_t mamba2_scratch(std::int64_t max_rows, int) {
  return static_cast<std::size_t>(max_rows * C::heads * C::head_dim) * sizeof(float);
}

template <class C>
void mamba2(Context& ctx, const mamba2_args& a) {
  static_assert(!std::is_same_v<typename C::norm_t, none>, "ranks that share a group are GPUs");
  constexpr std::int64_t heads = C::heads;
  auto* found = reinterpret_cast<float*>(ctx.scratch);
  recur<C>(ctx, a, heads, 2 * C::state_size * C::head_dim,
           [&](std::int64_t head) { return detail::SsmHead<C>{a, head, found}; });
  constexpr std::int64_t kGroup = heads * C::head_dim / C::groups;
  ctx.threads.parallel_for(a.M * C::groups, rows_a_part(kGroup), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) detail::ssm_norm<C>(a, found, i / C::groups, i % C::groups);
  });
}

}  // namespace trtc
