// The gated delta rule over the rows of each sequence, head by head, and the gated norm of the result.
#pragma once

#include <cmath>

#include "cpu/activation.hpp"
#include "cpu/context.hpp"
#include "cpu/quantizer.hpp"
#include "cpu/recurrence.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct gated_delta_args {
  View qkv, z, b, a, state, query_start, context_lens, page_table, slots, rate, dt_bias, norm, pre_scale, out_scale, out,
      state_out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

template <class C>
struct DeltaHead {
  using T = typename C::qkv_t;
  static constexpr std::int64_t kKeys = C::key_dim, kValues = C::value_dim;
  const gated_delta_args& a;
  std::int64_t head;
  // Whether each row of the matrix decays by a factor of its own.
  static constexpr bool kByRow = C::decays > 1;
  alignas(64) float q[kKeys], k[kKeys], o[kValues];
  // Of each row: its factor, and its part of the key times that.
  alignas(64) float decays[kByRow ? kKeys : 1], decayed[kByRow ? kKeys : 1];

  float* state_in(std::int32_t page) const { return a.state.row<float>(page) + head * kKeys * kValues; }
  static void clear(float* state) { std::fill_n(state, kKeys * kValues, 0.f); }

  // The unit vector of `from`, times `scale`.
  static void unit(float* to, const T* from, float scale) {
    Floats squares{};
    for_vectors(kKeys, [&](std::int64_t i, auto n) {
      const Floats x = load(from + i, n);
      squares = fma(x, x, squares);
    });
    const float by = scale / std::sqrt(sum(squares) + 1e-6f);
    for_vectors(kKeys, [&](std::int64_t i, auto n) { store(to + i, load(from + i, n) * by, n); });
  }

  // `kVectors` neighbours of one row of the matrix, for all rows.
  template <int kVectors, class N>
  void columns(std::int64_t first, const T* v, const float* from, float* to, float decay, float beta, N n) {
    constexpr std::int64_t kStep = kLanes;
    Floats new_values[kVectors], result[kVectors];
    for (int j = 0; j < kVectors; ++j) new_values[j] = result[j] = Floats{};
    for (std::int64_t i = 0; i < kKeys; ++i) {
      const Floats key = broadcast(kByRow ? decayed[i] : k[i]);
      for (int j = 0; j < kVectors; ++j) {
        new_values[j] = fma(load(from + i * kValues + first + j * kStep, n), key, new_values[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      const Floats known = kByRow ? new_values[j] : decay * new_values[j];
      new_values[j] = beta * (load(v + first + j * kStep, n) - known);
    }
    for (std::int64_t i = 0; i < kKeys; ++i) {
      const Floats key = broadcast(k[i]), query = broadcast(q[i]);
      const Floats kept = broadcast(kByRow ? decays[i] : decay);
      for (int j = 0; j < kVectors; ++j) {
        const std::int64_t at = i * kValues + first + j * kStep;
        const Floats value = fma(key, new_values[j], kept * load(from + at, n));
        store(to + at, value, n);
        result[j] = fma(value, query, result[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) store(o + first + j * kStep, result[j], n);
  }

  // Of a head's decay number `i`.
  float log_decay(std::int64_t number, std::int64_t i) const {
    const std::int64_t at = head * C::decays + i;
    const float x = to_float(a.a.row<const typename C::a_t>(number)[at]) + a.dt_bias.row<const float>(0)[at];
    const float softplus = x > 20.f ? x : std::log1p(std::exp(x));
    return a.rate.row<const float>(0)[head] * softplus;
  }

  void decay_rows(std::int64_t number) {
    for (std::int64_t i = 0; i < kKeys; ++i) decays[i] = log_decay(number, i);
    for_vectors(kKeys, [&](std::int64_t i, auto n) {
      const Floats factors = exp(load(decays + i, n));
      store(decays + i, factors, n);
      store(decayed + i, factors * load(k + i, n), n);
    });
  }

  void row(std::int64_t number, const float* from, float* to) {
    const T* of_row = a.qkv.row<const T>(number);
    const std::int64_t key_head = head / (C::value_heads / C::key_heads);
    unit(q, of_row + key_head * kKeys, 1.f / std::sqrt(static_cast<float>(kKeys)));
    unit(k, of_row + (C::key_heads + key_head) * kKeys, 1.f);
    const T* v = of_row + 2 * C::key_heads * kKeys + head * kValues;
    const float b = to_float(a.b.row<const typename C::b_t>(number)[head]);
    const float decay = kByRow ? 1.f : std::exp(log_decay(number, 0));
    if constexpr (kByRow) decay_rows(number);
    const float beta = C::write_scale / (1.f + std::exp(-b));
    constexpr std::int64_t kWide = 4 * kLanes, kWhole = kValues / kWide * kWide;
    for (std::int64_t j = 0; j < kWhole; j += kWide) columns<4>(j, v, from, to, decay, beta, AllLanes{});
    for_vectors(kValues - kWhole, [&](std::int64_t j, auto n) {
      columns<1>(kWhole + j, v, from, to, decay, beta, n);
    });
    finish(number);
  }

  void finish(std::int64_t number) {
    Floats squares{};
    for_vectors(kValues, [&](std::int64_t i, auto n) {
      const Floats x = load(o + i, n);
      squares = fma(x, x, squares);
    });
    const float by = 1.f / std::sqrt(sum(squares) / static_cast<float>(kValues) + C::eps);
    using Out = typename C::out_t;
    const Quantizer<T, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a.pre_scale, a.out_scale);
    const std::int64_t column = head * kValues;
    const auto* z = a.z.row<const typename C::z_t>(number) + column;
    auto* out = a.out.row<Out>(number) + column;
    for_vectors(kValues, [&](std::int64_t i, auto n) {
      const Floats normed = load(o + i, n) * by * load(a.norm.row<const float>(0) + i, n);
      quantizer.store(out + i, column + i, normed * activated<C::gate>(load(z + i, n)), n);
    });
  }
};

}  // namespace detail

template <class C>
void gated_delta(Context& ctx, const gated_delta_args& a) {
  constexpr std::int64_t heads = C::value_heads;
  recur<C>(ctx, a, heads, 2 * C::key_dim * C::value_dim,
           [&](std::int64_t head) { return detail::DeltaHead<C>{a, head}; });
}

}  // namespace trtc
