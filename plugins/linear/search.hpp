// Where the largest results of few rows are, from half of the weight's bytes.
//
// In layout planes an int8 is 16 * coarse + fine (plugins/layouts.py). The products of the coarse
// plane alone leave a result uncertain by those of the fine one. The panel that is likely to have a
// row's largest result is multiplied again, by both planes, exactly as without a search; then all
// panels that may have a larger one. What stays in the others is near, and less than the largest.
//
// How uncertain: fine nibbles are what rounding left over, of mean square 21.5, so that a sum of them
// times x has the standard deviation s * sqrt(21.5) * |x| in a group of scale s. kDeviations of them
// are left for it. (The bound that holds for any nibbles is no use: it is wider than all results are
// apart.)
#pragma once

#include <limits>

#include "cpu/context.hpp"
#include "cpu/gemm.hpp"
#include "cpu/vector.hpp"
#include "linear/epilogue.hpp"

namespace trtc::detail {

// More rows are multiplied about as fast by both planes at once, as memory is not what they wait for.
// (AVX2 takes half as many instructions for nibbles as for bytes.)
#ifdef TRTC_AVX2
constexpr std::int64_t kSearchedRows = 16;
#else
constexpr std::int64_t kSearchedRows = 8;
#endif
constexpr float kDeviations = 6.f;
constexpr float kFineMeanSquare = 21.5f;  // of -8 ... 7

template <class C>
using CoarseProduct =
    gemm::Product<typename C::x_t, DType::i4, Multiply::dynamic_i8, C::group_size, false, Layout::packed>;

// The scratch area of a search.
template <class C>
class SearchScratch {
  using P = LinearProduct<C>;
  using Coarse = CoarseProduct<C>;
  static constexpr std::int64_t kPanels = gemm::ceil_div(C::N, gemm::kPanel);

 public:
  SearchScratch(std::byte* area, int num_threads) {
    Carver carver(area);
    const std::int64_t rows = gemm::max_chunk_rows<P>(kSearchedRows);
    x = gemm::carve_rows<P>(carver, rows, C::K);
    coarse_x = gemm::carve_rows<Coarse>(carver, rows, C::K);
    variance = carver.take<float>(rows * P::groups(C::K));
    most = carver.take<float>(kPanels * kSearchedRows);
    workspaces_ = area + carver.bytes();
    Carver own;
    carve_workspaces(own, rows);
    thread_bytes_ = own.bytes();
    bytes_ = carver.bytes() + thread_bytes_ * static_cast<std::size_t>(num_threads);
    rows_ = rows;
  }

  struct Workspaces {
    gemm::Workspace exact, coarse;
  };

  gemm::PackedRows x, coarse_x;
  float* variance;  // [rows][groups] of what is uncertain of a sum whose weights have the scale 1
  float* most;      // [panels][rows] what the largest result of a panel may be

  std::size_t bytes() const { return bytes_; }

  Workspaces workspaces(int thread) const {
    Carver own(workspaces_ + thread_bytes_ * static_cast<std::size_t>(thread));
    return carve_workspaces(own, rows_);
  }

 private:
  static Workspaces carve_workspaces(Carver& carver, std::int64_t rows) {
    const gemm::Workspace exact = gemm::carve_workspace<P>(carver, rows, C::K);
    return {exact, gemm::carve_workspace<Coarse>(carver, rows, C::K)};
  }

  std::byte* workspaces_;
  std::size_t thread_bytes_, bytes_;
  std::int64_t rows_;
};

// The sum of squares of int8 codes.
inline float energy(const std::int8_t* codes, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += codes[i] * codes[i];
  return static_cast<float>(sum);
}

template <class C>
class Search {
  using P = LinearProduct<C>;
  using Coarse = CoarseProduct<C>;
  using X = typename C::x_t;
  static constexpr std::int64_t kPanels = gemm::ceil_div(C::N, gemm::kPanel);
  static constexpr std::int64_t kGroups = P::groups(C::K);
  static_assert(std::is_same_v<typename C::input_scale_t, none> && std::is_same_v<typename C::residual_t, none>,
                "a search knows nothing of what varies by row beside the sums");

 public:
  Search(Context& ctx, const linear_args& a)
      : ctx_(ctx), a_(a), scratch_(ctx.scratch, ctx.threads.size()), weights_(linear_weights<C>(a)), epilogue_(a) {
    set_tiles<P>(scratch_.x);
    set_tiles<Coarse>(scratch_.coarse_x);
  }

  void run() {
    pack();
    multiply_coarse();
    multiply_candidates();
  }

 private:
  template <class Of>
  void set_tiles(gemm::PackedRows& x) const {
    const gemm::Tiling tiling = gemm::tile_rows<Of>(a_.M);
    x.height = tiling.height;
    x.tiles = tiling.tiles;
    x.rows = a_.M;
  }

  void pack() {
    std::int8_t* quantized = scratch_.workspaces(0).exact.quantized;
    const auto row_of = [&](std::int64_t row) { return a_.x.template row<const X>(row); };
    for (std::int64_t tile = 0; tile < scratch_.x.tiles; ++tile) {
      gemm::pack_tile<P>(scratch_.x, tile, quantized, row_of);
    }
    for (std::int64_t tile = 0; tile < scratch_.coarse_x.tiles; ++tile) {
      gemm::pack_tile<Coarse>(scratch_.coarse_x, tile, quantized, row_of);
    }
    for (std::int64_t row = 0; row < a_.M; ++row) set_variance(row, quantized);
  }

  void set_variance(std::int64_t row, std::int8_t* quantized) {
    constexpr std::int64_t kGroup = C::group_size;
    const X* x = a_.x.template row<const X>(row);
    for (std::int64_t group = 0; group < kGroups; ++group) {
      const std::int64_t first = group * kGroup, count = C::K - first < kGroup ? C::K - first : kGroup;
      const float unit = gemm::quantize_group(x + first, count, quantized);
      scratch_.variance[row * kGroups + group] =
          kDeviations * kDeviations * kFineMeanSquare * unit * unit * energy(quantized, count);
    }
  }

  // All results without those of their fine plane, and what each panel's may be at most.
  void multiply_coarse() {
    ctx_.threads.parallel_for(kPanels, gemm::kMostPanels, [&](std::int64_t begin, std::int64_t end, int thread) {
      const auto finish = [&](std::int64_t row, std::int64_t column, std::int64_t columns, float* sums) {
        most(column / gemm::kPanel, row) = bound(row, column, columns, sums);
        epilogue_(row, column, columns, sums);
      };
      gemm::multiply_panels<Coarse>(scratch_.coarse_x, weights_, begin, end, scratch_.workspaces(thread).coarse, finish);
    });
  }

  float& most(std::int64_t panel, std::int64_t row) { return scratch_.most[panel * kSearchedRows + row]; }

  // Of a panel's columns in a row; sums are made those of 16 * coarse.
  float bound(std::int64_t row, std::int64_t column, std::int64_t columns, float* sums) const {
    const float* scales = weights_.scale + column * kGroups;  // [groups][columns]
    const float* variances = scratch_.variance + row * kGroups;
    const Floats nothing = broadcast(-std::numeric_limits<float>::infinity());
    Floats highest = nothing;
    for_vectors(columns, [&](std::int64_t i, auto n) {
      const Floats sum = 16.f * load(sums + i, n);
      store(sums + i, sum, n);
      Floats variance{};
      for (std::int64_t group = 0; group < kGroups; ++group) {
        const Floats scale = load(scales + group * columns + i, n);
        variance = fma(scale * scale, broadcast(variances[group]), variance);
      }
      const Floats at_most = with_bias(sum, column + i, n) + square_root(variance);
      const auto is_there = lane_numbers() < static_cast<float>(static_cast<int>(n));
      highest = trtc::max(is_there ? at_most : nothing, highest);
    });
    return largest(highest);
  }

  // What is compared: results before their softcap, which keeps their order.
  template <class N>
  Floats with_bias(Floats sum, std::int64_t column, N n) const {
    if constexpr (std::is_same_v<typename C::bias_t, none>) return sum;
    return sum + load(a_.bias.template row<const float>(0) + column, n);
  }

  // First the panels that are likely to have a row's largest result, then all that may have a larger.
  void multiply_candidates() {
    std::int64_t likely[kSearchedRows];
    float found[kSearchedRows];
    for (std::int64_t row = 0; row < a_.M; ++row) {
      likely[row] = likely_panel(row);
      found[row] = multiply_exactly(likely[row], row, scratch_.workspaces(0).exact);
    }
    ctx_.threads.parallel_for(kPanels, gemm::kMostPanels, [&](std::int64_t begin, std::int64_t end, int thread) {
      const gemm::Workspace workspace = scratch_.workspaces(thread).exact;
      for (std::int64_t panel = begin; panel < end; ++panel) {
        if (is_candidate(panel, likely, found)) multiply_exactly(panel, 0, workspace);
      }
    });
  }

  std::int64_t likely_panel(std::int64_t row) {
    std::int64_t best = 0;
    for (std::int64_t panel = 1; panel < kPanels; ++panel) {
      if (most(panel, row) > most(best, row)) best = panel;
    }
    return best;
  }

  // A panel's results of all rows; returns the largest of `row`.
  float multiply_exactly(std::int64_t panel, std::int64_t row, const gemm::Workspace& workspace) const {
    Floats highest = broadcast(-std::numeric_limits<float>::infinity());
    const auto finish = [&](std::int64_t of, std::int64_t column, std::int64_t columns, const float* sums) {
      if (of == row) {
        for_vectors(columns, [&](std::int64_t i, auto n) {
          const auto is_there = lane_numbers() < static_cast<float>(static_cast<int>(n));
          const Floats result = with_bias(load(sums + i, n), column + i, n);
          highest = trtc::max(is_there ? result : highest, highest);
        });
      }
      epilogue_(of, column, columns, sums);
    };
    gemm::multiply_panels<P>(scratch_.x, weights_, panel, panel + 1, workspace, finish);
    return largest(highest);
  }

  bool is_candidate(std::int64_t panel, const std::int64_t* likely, const float* found) {
    bool may_have_larger = false;
    for (std::int64_t row = 0; row < a_.M; ++row) {
      if (likely[row] == panel) return false;  // multiplied already
      if (!(most(panel, row) < found[row])) may_have_larger = true;  // NaN too
    }
    return may_have_larger;
  }

  Context& ctx_;
  const linear_args& a_;
  SearchScratch<C> scratch_;
  gemm::Weights weights_;
  LinearEpilogue<C> epilogue_;
};

template <class C>
void search_linear(Context& ctx, const linear_args& a) {
  Search<C>(ctx, a).run();
}

}  // namespace trtc::detail
