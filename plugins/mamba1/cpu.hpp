// The selective scan of Mamba over the rows of each sequence, some channels at a time.
#pragma once

#include <cmath>

#include "cpu/activation.hpp"
#include "cpu/context.hpp"
#include "cpu/recurrence.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct mamba1_args {
  View x, z, dt, b, c, state, query_start, context_lens, page_table, slots, rate, dt_bias, skip, out, state_out;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

// Channels that a thread takes at once.
constexpr std::int64_t kScanChannels = 64;

// Channels [first, first + count) of a sequence; its state has a row of all channels for each of state_size.
template <class C>
struct ScanChannels {
  const mamba1_args& a;
  std::int64_t first, count;

  float* state_in(std::int32_t page) const { return a.state.row<float>(page) + first; }

  void clear(float* state) const {
    for (std::int64_t i = 0; i < C::state_size; ++i) std::fill_n(state + i * C::channels, count, 0.f);
  }

  // softplus(dt + dt_bias) of a row's channels.
  void steps(std::int64_t number, float* to) const {
    const auto* dt = a.dt.row<const typename C::dt_t>(number) + first;
    const float* bias = a.dt_bias.row<const float>(0) + first;
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = to_float(dt[i]) + bias[i];
      to[i] = x > 20.f ? x : std::log1p(std::exp(x));
    }
  }

  void row(std::int64_t number, const float* from, float* to) const {
    alignas(64) float step_of[kScanChannels];
    steps(number, step_of);
    const auto* b = a.b.row<const typename C::b_t>(number);
    const auto* c = a.c.row<const typename C::c_t>(number);
    const auto* x = a.x.row<const typename C::x_t>(number) + first;
    const auto* z = a.z.row<const typename C::z_t>(number) + first;
    auto* out = a.out.row<typename C::out_t>(number) + first;
    for_vectors(count, [&](std::int64_t j, auto n) {
      const Floats step = load(step_of + j, n), value = load(x + j, n), added = step * value;
      Floats result = load(a.skip.row<const float>(0) + first + j, n) * value;
      for (std::int64_t i = 0; i < C::state_size; ++i) {
        const Floats decay = exp(load(a.rate.row<const float>(i) + first + j, n) * step);
        const Floats kept = decay * load(from + i * C::channels + j, n);
        const Floats now = fma(broadcast(to_float(b[i])), added, kept);
        store(to + i * C::channels + j, now, n);
        result = fma(now, broadcast(to_float(c[i])), result);
      }
      store(out + j, result * activated<Activation::silu>(load(z + j, n)), n);
    });
  }
};

}  // namespace detail

template <class C>
void mamba1(Context& ctx, const mamba1_args& a) {
  constexpr std::int64_t kParts = (C::channels + detail::kScanChannels - 1) / detail::kScanChannels;
  recur<C>(ctx, a, kParts, 4 * C::state_size * detail::kScanChannels, [&](std::int64_t part) {
    const std::int64_t first = part * detail::kScanChannels, left = C::channels - first;
    return detail::ScanChannels<C>{a, first, left < detail::kScanChannels ? left : detail::kScanChannels};
  });
}

}  // namespace trtc
