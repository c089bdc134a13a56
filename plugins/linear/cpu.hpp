// out = softcap(x @ (weight * weight_scale).T * input_scale + bias) + residual.
#pragma once

#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/gemm.hpp"
#include "cpu/vector.hpp"

namespace trtc {

struct linear_args {
  View x, weight, weight_scale, weight_zero, input_scale, bias, residual, out;
  std::int64_t M;
};

namespace detail {

template <class C>
using LinearProduct = gemm::Product<typename C::x_t, C::weight_dtype, C::activation, C::group_size,
                                    !std::is_same_v<typename C::weight_zero_t, none>, C::layout>;

// Everything after the sums of one row and up to 16 columns.
template <class C>
class LinearEpilogue {
  using P = LinearProduct<C>;
  template <class T>
  static constexpr bool kHas = !std::is_same_v<T, none>;

 public:
  explicit LinearEpilogue(const linear_args& args) : a_(args), input_scale_(args.input_scale.scalar()) {}

  void operator()(std::int64_t row, std::int64_t first, std::int64_t columns, const float* sums) const {
    for_vectors(columns, [&](std::int64_t i, auto n) {
      const std::int64_t column = first + i;
      Floats value = load(sums + i, n);
      if constexpr (kHas<typename C::weight_scale_t> && !P::kGrouped) {
        value = value * load(a_.weight_scale.row<const float>(0) + column, n);
      }
      if constexpr (kHas<typename C::input_scale_t>) value = value * input_scale_;
      if constexpr (kHas<typename C::bias_t>) value = value + load(a_.bias.row<const float>(0) + column, n);
      if constexpr (C::softcap != 0.f) value = C::softcap * tanh(value / C::softcap);
      if constexpr (kHas<typename C::residual_t>) {
        value = value + load(a_.residual.row<const typename C::residual_t>(row) + column, n);
      }
      store(a_.out.row<typename C::out_t>(row) + column, value, n);
    });
  }

 private:
  const linear_args& a_;
  float input_scale_;
};

// The scratch area of a call: packed activations, then a workspace a thread.
template <class C>
struct LinearScratch {
  using P = LinearProduct<C>;

  LinearScratch(std::byte* area, std::int64_t max_rows) : carver(area) {
    const std::int64_t rows = gemm::max_chunk_rows<P>(max_rows);
    x = gemm::carve_rows<P>(carver, rows, C::K);
    shared_bytes = carver.bytes();
    workspace = gemm::carve_workspace<P>(carver, rows, C::K);
    thread_bytes = carver.bytes() - shared_bytes;
  }

  gemm::Workspace of_thread(std::byte* area, std::int64_t max_rows, int thread) const {
    Carver own(area + shared_bytes + thread_bytes * static_cast<std::size_t>(thread));
    return gemm::carve_workspace<P>(own, gemm::max_chunk_rows<P>(max_rows), C::K);
  }

  Carver carver;
  gemm::PackedRows x;
  gemm::Workspace workspace;
  std::size_t shared_bytes, thread_bytes;
};

}  // namespace detail

template <class C>
std::size_t linear_scratch(std::int64_t max_rows, int num_threads) {
  const detail::LinearScratch<C> scratch(nullptr, max_rows);
  return scratch.shared_bytes + scratch.thread_bytes * static_cast<std::size_t>(num_threads);
}

template <class C>
void linear(Context& ctx, const linear_args& a) {
  using P = detail::LinearProduct<C>;
  static_assert(!P::kGrouped || !std::is_same_v<typename C::weight_scale_t, none>, "groups have scales");
  const gemm::Weights weights{a.weight.row<const std::byte>(0), a.weight_scale.row<const float>(0),
                              a.weight_zero.row<const std::uint8_t>(0), C::N, C::K};
  const gemm::Tiling tiling = gemm::tile_rows<P>(a.M);
  const detail::LinearScratch<C> scratch(ctx.scratch, a.M);
  const auto workspace = [&](int thread) { return scratch.of_thread(ctx.scratch, a.M, thread); };

  for (std::int64_t tile = 0; tile < tiling.tiles; tile += tiling.chunk_tiles) {
    const std::int64_t first_row = tile * tiling.height;
    gemm::PackedRows x = scratch.x;
    x.height = tiling.height;
    x.tiles = tiling.tiles - tile < tiling.chunk_tiles ? tiling.tiles - tile : tiling.chunk_tiles;
    x.rows = a.M - first_row < x.tiles * x.height ? a.M - first_row : x.tiles * x.height;
    ctx.threads.parallel_for(x.tiles, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
      std::int8_t* quantized = workspace(thread).quantized;
      for (std::int64_t t = begin; t < end; ++t) {
        gemm::pack_tile<P>(x, t, quantized, [&](std::int64_t row) {
          return a.x.row<const typename C::x_t>(first_row + row);
        });
      }
    });
    const detail::LinearEpilogue<C> epilogue(a);
    const std::int64_t panels = gemm::ceil_div(C::N, gemm::kPanel);
    ctx.threads.parallel_for(panels, gemm::kMostPanels, [&](std::int64_t begin, std::int64_t end, int thread) {
      gemm::multiply_panels<P>(x, weights, begin, end, workspace(thread),
                               [&](std::int64_t row, std::int64_t column, std::int64_t columns, const float* sums) {
                                 epilogue(first_row + row, column, columns, sums);
                               });
    });
  }
}

}  // namespace trtc
