// out = softcap(x @ (weight * weight_scale).T * input_scale + bias) + residual.
#pragma once

#include <type_traits>

#include "cpu/context.hpp"
#include "cpu/gemm.hpp"
#include "linear/epilogue.hpp"
#include "linear/search.hpp"

namespace trtc {

namespace detail {

// The scratch area of a call: packed activations, then a workspace a thread.
template <class C>
class LinearScratch {
  using P = LinearProduct<C>;

 public:
  LinearScratch(std::byte* area, std::int64_t max_rows) : rows_(gemm::max_chunk_rows<P>(max_rows)) {
    Carver shared(area);
    x = gemm::carve_rows<P>(shared, rows_, C::K);
    workspaces_ = area + shared.bytes();
    shared_bytes_ = shared.bytes();
    Carver own;
    gemm::carve_workspace<P>(own, rows_, C::K);
    thread_bytes_ = own.bytes();
  }

  gemm::PackedRows x;

  std::size_t bytes(int num_threads) const {
    return shared_bytes_ + thread_bytes_ * static_cast<std::size_t>(num_threads);
  }

  gemm::Workspace workspace(int thread) const {
    Carver own(workspaces_ + thread_bytes_ * static_cast<std::size_t>(thread));
    return gemm::carve_workspace<P>(own, rows_, C::K);
  }

 private:
  std::int64_t rows_;
  std::byte* workspaces_;
  std::size_t shared_bytes_, thread_bytes_;
};

// Rows [first_row, first_row + x.rows): packed once, then multiplied by all panels.
template <class C>
void linear_chunk(Context& ctx, const linear_args& a, const LinearScratch<C>& scratch, const gemm::PackedRows& x,
                  std::int64_t first_row) {
  using P = LinearProduct<C>;
  ctx.threads.parallel_for(x.tiles, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
    std::int8_t* quantized = scratch.workspace(thread).quantized;
    const auto row_of = [&](std::int64_t row) { return a.x.row<const typename C::x_t>(first_row + row); };
    for (std::int64_t tile = begin; tile < end; ++tile) gemm::pack_tile<P>(x, tile, quantized, row_of);
  });
  const gemm::Weights weights = linear_weights<C>(a);
  const LinearEpilogue<C> epilogue(a);
  const auto finish = [&](std::int64_t row, std::int64_t column, std::int64_t columns, const float* sums) {
    epilogue(first_row + row, column, columns, sums);
  };
  constexpr std::int64_t kAllPanels = gemm::ceil_div(C::N, gemm::kPanel);
  ctx.threads.parallel_for(kAllPanels, gemm::kMostPanels, [&](std::int64_t begin, std::int64_t end, int thread) {
    gemm::multiply_panels<P>(x, weights, begin, end, scratch.workspace(thread), finish);
  });
}

}  // namespace detail

template <class C>
std::size_t linear_scratch(std::int64_t max_rows, int num_threads) {
  const std::size_t bytes = detail::LinearScratch<C>(nullptr, max_rows).bytes(num_threads);
  if constexpr (C::layout == Layout::planes) {
    const std::size_t searched = detail::SearchScratch<C>(nullptr, num_threads).bytes();
    return bytes > searched ? bytes : searched;
  }
  return bytes;
}

template <class C>
void linear(Context& ctx, const linear_args& a) {
  using P = detail::LinearProduct<C>;
  static_assert(!P::kGrouped || !std::is_same_v<typename C::weight_scale_t, none>, "groups have scales");
  static_assert(C::layout != Layout::row_major || P::kBlockDepth < 8 || C::K % 2 == 0, "a row is whole bytes");
  if (a.M == 0) return;
  if constexpr (C::layout == Layout::planes) {
    if (ctx.only_largest && a.M <= detail::kSearchedRows) return detail::search_linear<C>(ctx, a);
  }
  const gemm::Tiling tiling = gemm::tile_rows<P>(a.M);
  const detail::LinearScratch<C> scratch(ctx.scratch, a.M);
  for (std::int64_t tile = 0; tile < tiling.tiles; tile += tiling.chunk_tiles) {
    const std::int64_t first_row = tile * tiling.height, left = a.M - first_row;
    gemm::PackedRows x = scratch.x;
    x.height = tiling.height;
    x.tiles = tiling.tiles - tile < tiling.chunk_tiles ? tiling.tiles - tile : tiling.chunk_tiles;
    x.rows = left < x.tiles * x.height ? left : x.tiles * x.height;
    detail::linear_chunk<C>(ctx, a, scratch, x, first_row);
  }
}

}  // namespace trtc
