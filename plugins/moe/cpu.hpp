// out = sum over a row's experts of weight * down(activation(gate) * up), or of weight *
//       down(activation(up)), + sigmoid(shared_gate) * shared + residual. Weights may multiply x instead.
//
// Rows are grouped by expert, so that each expert's weights are read once for all its rows:
// route, group, pack, gate_up, activate and pack, down, combine. A row's experts are added up in
// the order of their ranks, whatever the grouping.
#pragma once

#include <type_traits>

#include "cpu/activation.hpp"
#include "cpu/context.hpp"
#include "cpu/gemm.hpp"
#include "cpu/hadamard.hpp"
#include "cpu/quantizer.hpp"
#include "moe/routing.hpp"

namespace trtc {

struct moe_args {
  View x, router_logits, gate_up, down, gate_up_scale, down_scale, gate_up_zero, down_zero, gate_up_input_scale,
      down_input_scale, gate_up_pre_scale, down_pre_scale, gate_up_bias, down_bias, residual, choice_bias, shared,
      shared_gate, expert_scale, expert_map, gate_up_order, gate_up_scale_unit, down_scale_unit, out;
  std::int64_t M;
};

namespace moe_detail {

// Rows of a call are handled in chunks, which bounds scratch memory: 256 rows of 8 experts.
constexpr std::int64_t kChunkRows = 256;
// Panels of an expert that a thread claims at a time.
constexpr std::int64_t kUnitPanels = 8;

// What an expert's linear is given: where codes have scales of their rows, what they stand for, or what they
// will be made of.
template <class T, ActQuant kQuant>
struct QuantizedTo {
  using type = T;
};
template <class T>
struct QuantizedTo<T, ActQuant::f8e4m3> {
  using type = f8e4m3;
};
template <class T>
struct QuantizedTo<T, ActQuant::i8> {
  using type = std::int8_t;
};
template <class T>
struct QuantizedTo<T, ActQuant::dynamic_f8e4m3> {
  using type = float;
};
template <class T, ActQuant kQuant>
using Quantized = typename QuantizedTo<T, kQuant>::type;

// One of an expert's two linears: rows [depth] -> [columns].
template <class C, std::int64_t kDepth_, std::int64_t kColumns_, class Zero, class Scale, class InputScale, class Pre,
          class Bias, class Unit>
struct Half {
  using T = typename C::x_t;
  using X = std::conditional_t<(C::hadamard > 0), float, Quantized<T, C::act_quant>>;
  static constexpr Multiply kMultiply =
      C::act_quant == ActQuant::dynamic_i8 ? Multiply::dynamic_i8 : Multiply::exact;
  // Bytes are E4M3 in units.
  static constexpr gemm::Scales kScales = kPresent<Unit> ? gemm::Scales::e4m3 : gemm::Scales::floats;
  using P = gemm::Product<X, C::weight_dtype, kMultiply, C::group_size, kPresent<Zero>, C::layout, kScales>;
  static constexpr bool kStatic = C::act_quant == ActQuant::f8e4m3 || C::act_quant == ActQuant::i8;
  using Rounding = Quantizer<T, X, Pre, std::conditional_t<kStatic, InputScale, none>>;
  static constexpr std::int64_t kDepth = kDepth_, kColumns = kColumns_;
  static constexpr bool kScalesColumns = kPresent<Scale> && !P::kGrouped;

  static_assert(!kStatic || kPresent<InputScale>, "static quantisation needs a scale an expert");
  static_assert(!kStatic || C::hadamard == 0, "scales of rows follow a Hadamard matrix");
  static_assert(!P::kGrouped || kPresent<Scale>, "groups have scales");
  static_assert(!kPresent<Scale> || std::is_same_v<Scale, std::conditional_t<kPresent<Unit>, std::uint8_t, float>>,
                "E8M0 scales are widened at build");
  static_assert(C::layout != Layout::row_major || P::kBlockDepth < 8 || kDepth % 2 == 0, "a row is whole bytes");

  View weight, scale, zero, input_scale, pre_scale, bias, unit;

  gemm::Weights weights(std::int64_t expert) const {
    const std::int64_t bytes = C::layout != Layout::row_major ? P::packed_bytes(kColumns, kDepth)
                                                           : kColumns * gemm::row_bytes<C::weight_dtype>(kDepth);
    const std::int64_t scales = expert * kColumns * P::groups(kDepth);
    gemm::Weights found{weight.row<const std::byte>(0) + expert * bytes, nullptr,
                        zero.data == nullptr ? nullptr : zero.row<const std::uint8_t>(0) + scales, kColumns, kDepth};
    if constexpr (P::kByteScales) {
      found.scale_codes = scale.row<const std::uint8_t>(0) + scales;
    } else if constexpr (kPresent<Scale>) {
      found.scale = scale.row<const float>(0) + scales;
    }
    return found;
  }

  // The rest of the rounding of a row, which needs all of it.
  static void finish(X* row) {
    if constexpr (C::hadamard > 0) hadamard<kDepth, C::hadamard>(row);
    if constexpr (C::act_quant == ActQuant::dynamic_f8e4m3) {
      constexpr std::int64_t width = C::group_size > 0 ? C::group_size : kDepth;
      static_assert(kDepth % width == 0, "groups are whole");
      round_trip(row, kDepth, width);
    }
  }

  Rounding rounding(std::int64_t expert) const {
    return Rounding(expert_view(pre_scale, expert * kDepth), expert_view(input_scale, expert));
  }

  // A sum of the product, dequantised to a float, and the bias.
  template <class N>
  Floats scaled(std::int64_t expert, std::int64_t column, const float* sums, N n) const {
    Floats value = load(sums, n);
    if constexpr (kScalesColumns) value = value * load(scale.row<const float>(0) + expert * kColumns + column, n);
    if constexpr (kPresent<Unit>) value = value * load(unit.row<const float>(0) + expert * kColumns + column, n);
    if constexpr (kStatic) value = value * input_scale.row<const float>(0)[expert];
    if constexpr (kPresent<Bias>) value = value + load(bias.row<const float>(0) + expert * kColumns + column, n);
    return value;
  }

 private:
  static View expert_view(const View& view, std::int64_t offset) {
    return {view.data == nullptr ? nullptr : static_cast<float*>(view.data) + offset, 0};
  }
};

template <class C>
using GateUp = Half<C, C::H, C::parts * C::I, typename C::gate_up_zero_t, typename C::gate_up_scale_t,
                    typename C::gate_up_input_scale_t, typename C::gate_up_pre_scale_t, typename C::gate_up_bias_t,
                    typename C::gate_up_scale_unit_t>;
template <class C>
using Down = Half<C, C::I, C::H, typename C::down_zero_t, typename C::down_scale_t, typename C::down_input_scale_t,
                  typename C::down_pre_scale_t, typename C::down_bias_t, typename C::down_scale_unit_t>;

// The rows that chose one expert: pairs [first, first + x.rows) of the grouped order.
struct Job {
  std::int64_t expert;
  std::int64_t first;
  gemm::PackedRows x;  // of gate_up
  gemm::PackedRows h;  // of down
};

// The memory of a chunk of rows. A pair is a row and one of its experts: row * top_k + rank.
template <class C>
struct Scratch {
  using T = typename C::x_t;
  using P1 = typename GateUp<C>::P;
  using P2 = typename Down<C>::P;

  // The memory of one thread; the linears take turns.
  struct Thread {
    gemm::Workspace gate_up, down;
    T* ordered;                    // [H], x as an expert reads it, if each has an order of its own
    typename GateUp<C>::X* row;    // [max(H, I)]
  };

  Scratch(std::byte* area, std::int64_t max_rows)
      : rows_(max_rows < kChunkRows ? max_rows : kChunkRows), carver_(area), area_(area) {
    const std::int64_t pairs = rows_ * C::top_k;
    weights = carver_.take<float>(pairs);
    experts = carver_.take<std::int32_t>(pairs);
    grouped = carver_.take<std::int32_t>(pairs);
    starts = carver_.take<std::int32_t>(C::E + 1);
    jobs = carver_.take<Job>(C::E < pairs ? C::E : pairs);
    const std::int64_t padded = padded_pairs(pairs);
    x = gemm::carve_rows<P1>(carver_, padded, C::H);
    gate_up = carver_.take<T>(pairs * C::parts * C::I);
    h = gemm::carve_rows<P2>(carver_, padded, C::I);
    y = carver_.take<float>(pairs * C::H);
    shared_bytes_ = carver_.bytes();
    carve_thread(carver_);
    thread_bytes_ = carver_.bytes() - shared_bytes_;
  }

  std::size_t bytes(int num_threads) const {
    return shared_bytes_ + thread_bytes_ * static_cast<std::size_t>(num_threads);
  }

  Thread thread(int number) const {
    Carver own(area_ + shared_bytes_ + thread_bytes_ * static_cast<std::size_t>(number));
    return carve_thread(own);
  }

  float* weights;        // [pairs], of the experts of each row
  std::int32_t* experts; // [pairs]
  std::int32_t* grouped; // [pairs], pairs by expert
  std::int32_t* starts;  // [E + 1], where an expert's pairs start
  Job* jobs;
  gemm::PackedRows x;
  T* gate_up;            // [pairs][parts * I], grouped
  gemm::PackedRows h;
  float* y;              // [pairs][H], by pair

 private:
  // Every expert's last tile may have missing rows.
  static std::int64_t padded_pairs(std::int64_t pairs) {
    const std::int64_t active = C::E < pairs ? C::E : pairs;
    return pairs + active * (P1::kMaxHeight - 1);
  }

  Thread carve_thread(Carver& carver) const {
    const std::int64_t rows = gemm::ceil_div(rows_, P1::kMaxHeight) * P1::kMaxHeight;
    Thread thread{};
    thread.gate_up = gemm::carve_workspace<P1>(carver, rows, C::H);
    thread.down = gemm::carve_workspace<P2>(carver, rows, C::I);
    thread.ordered = carver.template take<T>(kPresent<typename C::gate_up_order_t> ? C::H : 0);
    thread.row = carver.template take<typename GateUp<C>::X>(C::H > C::I ? C::H : C::I);
    return thread;
  }

  std::int64_t rows_;
  Carver carver_;
  std::byte* area_;
  std::size_t shared_bytes_, thread_bytes_;
};

// Sorts pairs by expert (rows in order) and gives every expert that has any a job.
template <class C>
std::int64_t group_pairs(const Scratch<C>& s, std::int64_t rows) {
  using P1 = typename Scratch<C>::P1;
  using P2 = typename Scratch<C>::P2;
  const std::int64_t pairs = rows * C::top_k;
  for (std::int64_t e = 0; e <= C::E; ++e) s.starts[e] = 0;
  for (std::int64_t i = 0; i < pairs; ++i) ++s.starts[s.experts[i] + 1];
  for (std::int64_t e = 0; e < C::E; ++e) s.starts[e + 1] += s.starts[e];
  std::int64_t count = 0, padded = 0;
  for (std::int64_t e = 0; e < C::E; ++e) {
    const std::int64_t first = s.starts[e], size = s.starts[e + 1] - first;
    if (size == 0) continue;
    const gemm::Tiling tiling = gemm::tile_rows<P1>(size);
    const auto part = [&](auto rows_of_half) {
      rows_of_half.rows = size;
      rows_of_half.height = tiling.height;
      rows_of_half.tiles = tiling.tiles;
      return rows_of_half;
    };
    s.jobs[count++] = {e, first, part(gemm::skip_rows<P1>(s.x, padded)), part(gemm::skip_rows<P2>(s.h, padded))};
    padded += tiling.tiles * tiling.height;
  }
  for (std::int64_t i = 0; i < pairs; ++i) s.grouped[s.starts[s.experts[i]]++] = static_cast<std::int32_t>(i);
  return count;
}

// Calls body(job, first panel, last panel, thread) for all panels of all jobs.
template <class C, class Body>
void for_panels(Context& ctx, const Scratch<C>& s, std::int64_t jobs, std::int64_t columns, Body&& body) {
  const std::int64_t panels = gemm::ceil_div(columns, gemm::kPanel);
  const std::int64_t units = gemm::ceil_div(panels, kUnitPanels);
  ctx.threads.for_each(jobs * units, [&](std::int64_t unit, int thread) {
    const std::int64_t begin = unit % units * kUnitPanels;
    const std::int64_t end = begin + kUnitPanels < panels ? begin + kUnitPanels : panels;
    body(s.jobs[unit / units], begin, end, thread);
  });
}

// Rows first_row.. of the chunk to every expert that they chose.
template <class C>
void pack_inputs(const Scratch<C>& s, const moe_args& a, const GateUp<C>& half, std::int64_t first_row, const Job& job,
                 const typename Scratch<C>::Thread& own) {
  const auto rounding = half.rounding(job.expert);
  const auto row_of = [&](std::int64_t i) {
    const std::int64_t pair = s.grouped[job.first + i];
    const auto* x = a.x.row<const typename C::x_t>(first_row + pair / C::top_k);
    if constexpr (kPresent<typename C::gate_up_order_t>) {
      const auto* order = static_cast<const std::int32_t*>(a.gate_up_order.data) + job.expert * C::H;
      for (std::int64_t k = 0; k < C::H; ++k) own.ordered[k] = x[order[k]];
      x = own.ordered;
    }
    for_vectors(C::H, [&](std::int64_t k, auto n) {
      Floats given = load(x + k, n);
      if constexpr (C::weighs_inputs != 0) given = rounded<typename C::x_t>(s.weights[pair] * given);
      rounding.store(own.row + k, k, given, n);
    });
    half.finish(own.row);
    return own.row;
  };
  for (std::int64_t t = 0; t < job.x.tiles; ++t) {
    gemm::pack_tile<typename GateUp<C>::P>(job.x, t, own.gate_up.quantized, row_of);
  }
}

// activation(gate) * up, both within the limit if there is one.
template <class C>
Floats gated(Floats gate, Floats up) {
  if constexpr (C::limit != 0) {
    const Floats limit = broadcast(static_cast<float>(C::limit));
    // In this order a NaN stays one.
    gate = min(gate, limit);
    up = max(-limit, min(up, limit));
  }
  if constexpr (C::up_offset != 0) up = up + static_cast<float>(C::up_offset);
  return rounded<typename C::x_t>(activated<C::activation>(gate)) * up;
}

// activation(gate) * up of every row of a job, or activation(up), packed for down.
template <class C>
void activate(const Scratch<C>& s, const Down<C>& half, const Job& job, const typename Scratch<C>::Thread& own) {
  using T = typename C::x_t;
  const auto rounding = half.rounding(job.expert);
  const auto row_of = [&](std::int64_t i) {
    const T* gate = s.gate_up + (job.first + i) * C::parts * C::I;
    for_vectors(C::I, [&](std::int64_t k, auto n) {
      const Floats first = load(gate + k, n);
      if constexpr (C::parts == 1) {
        rounding.store(own.row + k, k, activated<C::activation>(first), n);
      } else {
        rounding.store(own.row + k, k, gated<C>(first, load(gate + C::I + k, n)), n);
      }
    });
    half.finish(own.row);
    return own.row;
  };
  for (std::int64_t t = 0; t < job.h.tiles; ++t) {
    gemm::pack_tile<typename Down<C>::P>(job.h, t, own.down.quantized, row_of);
  }
}

// The weighted sum of a row's experts, in the order of their ranks.
template <class C>
void combine(const Scratch<C>& s, const moe_args& a, std::int64_t row, std::int64_t row_of_chunk) {
  float share = 1.f;
  if constexpr (kPresent<typename C::shared_gate_t>) share = sigmoid(*a.shared_gate.row<const float>(row));
  for_vectors(C::H, [&](std::int64_t i, auto n) {
    Floats total{};
    for (std::int64_t rank = 0; rank < C::top_k; ++rank) {
      const std::int64_t pair = row_of_chunk * C::top_k + rank;
      const float weight = C::weighs_inputs != 0 ? 1.f : s.weights[pair];
      total = total + weight * load(s.y + pair * C::H + i, n);
    }
    if constexpr (kPresent<typename C::shared_t>) {
      total = total + share * load(a.shared.row<const typename C::shared_t>(row) + i, n);
    }
    if constexpr (kPresent<typename C::residual_t>) {
      total = total + load(a.residual.row<const typename C::residual_t>(row) + i, n);
    }
    store(a.out.row<typename C::out_t>(row) + i, total, n);
  });
}

// Rows [first_row, first_row + rows).
template <class C>
void run_chunk(Context& ctx, const Scratch<C>& s, const moe_args& a, std::int64_t first_row, std::int64_t rows) {
  const GateUp<C> gate_up{a.gate_up, a.gate_up_scale, a.gate_up_zero, a.gate_up_input_scale, a.gate_up_pre_scale,
                          a.gate_up_bias, a.gate_up_scale_unit};
  const Down<C> down{a.down,           a.down_scale, a.down_zero,      a.down_input_scale,
                     a.down_pre_scale, a.down_bias,  a.down_scale_unit};
  ctx.threads.parallel_for(rows, 8, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      route<C>(a.router_logits.row<const float>(first_row + i), a.choice_bias, a.expert_scale,
               s.experts + i * C::top_k, s.weights + i * C::top_k);
    }
  });
  const std::int64_t jobs = group_pairs<C>(s, rows);
  ctx.threads.for_each(jobs, [&](std::int64_t j, int thread) {
    pack_inputs<C>(s, a, gate_up, first_row, s.jobs[j], s.thread(thread));
  });
  for_panels<C>(ctx, s, jobs, C::parts * C::I, [&](const Job& job, std::int64_t begin, std::int64_t end, int thread) {
    gemm::multiply_panels<typename GateUp<C>::P>(
        job.x, gate_up.weights(job.expert), begin, end, s.thread(thread).gate_up,
        [&](std::int64_t row, std::int64_t column, std::int64_t columns, const float* sums) {
          auto* out = s.gate_up + (job.first + row) * C::parts * C::I + column;
          for_vectors(columns, [&](std::int64_t i, auto n) {
            store(out + i, gate_up.scaled(job.expert, column + i, sums + i, n), n);
          });
        });
  });
  ctx.threads.for_each(jobs, [&](std::int64_t j, int thread) { activate<C>(s, down, s.jobs[j], s.thread(thread)); });
  for_panels<C>(ctx, s, jobs, C::H, [&](const Job& job, std::int64_t begin, std::int64_t end, int thread) {
    gemm::multiply_panels<typename Down<C>::P>(
        job.h, down.weights(job.expert), begin, end, s.thread(thread).down,
        [&](std::int64_t row, std::int64_t column, std::int64_t columns, const float* sums) {
          float* out = s.y + s.grouped[job.first + row] * C::H + column;
          for_vectors(columns, [&](std::int64_t i, auto n) {
            store(out + i, down.scaled(job.expert, column + i, sums + i, n), n);
          });
        });
  });
  ctx.threads.parallel_for(rows, 4, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) combine<C>(s, a, first_row + i, i);
  });
}

}  // namespace moe_detail

template <class C>
std::size_t moe_scratch(std::int64_t max_rows, int num_threads) {
  return moe_detail::Scratch<C>(nullptr, max_rows).bytes(num_threads);
}

template <class C>
void moe(Context& ctx, const moe_args& a) {
  static_assert(!moe_detail::kPresent<typename C::expert_map_t>, "one process has every expert");
  const moe_detail::Scratch<C> scratch(ctx.scratch, a.M);
  for (std::int64_t row = 0; row < a.M; row += moe_detail::kChunkRows) {
    const std::int64_t left = a.M - row;
    moe_detail::run_chunk<C>(ctx, scratch, a, row, left < moe_detail::kChunkRows ? left : moe_detail::kChunkRows);
  }
}

}  // namespace trtc
