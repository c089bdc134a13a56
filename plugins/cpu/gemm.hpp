// Activations times packed weights: the product that linear layers and experts are made of.
//
//   using P = gemm::Product<X, DType, Multiply, group size, zero points?, Layout>;
//   gemm::pack_tile<P>(...)          once a tile of activations (gemm_rows.hpp)
//   gemm::multiply_panels<P>(...)    for any panels of 16 columns, on any thread
//
// The weights of a step of panels stream through the first-level cache once for all tiles; sums
// that leave the registers between ranges of K wait in the thread's workspace.
#pragma once

#include "context.hpp"
#include "gemm_format.hpp"
#include "gemm_kernels.hpp"
#include "gemm_rows.hpp"
#include "gemm_weights.hpp"

namespace trtc::gemm {

// A thread's own memory.
struct Workspace {
  float* totals;          // [padded rows][kStepColumns]
  std::byte* gathered;    // [kPanels][range] blocks, for row-major weights
  std::byte* expanded;    // [kPanels][range * kExpansion] blocks, for narrow weights
  float* scale;           // [groups][kStepColumns]
  std::int32_t* zero;     // [groups][kStepColumns]
  std::int8_t* quantized; // a row, while it is packed
};

template <class P>
Workspace carve_workspace(Carver& carver, std::int64_t padded_rows, std::int64_t depth) {
  const std::int64_t range = P::range_blocks(depth) * kPanels * kBlockBytes;
  Workspace ws{};
  ws.totals = carver.take<float>(padded_rows * kStepColumns);
  if (P::kLayout == Layout::row_major) ws.gathered = carver.take<std::byte>(range);
  if (P::kExpands) ws.expanded = carver.take<std::byte>(range * P::kExpansion);
  if (P::kGrouped) ws.scale = carver.take<float>(P::groups(depth) * kStepColumns);
  if (P::kHasZero) ws.zero = carver.take<std::int32_t>(P::groups(depth) * kStepColumns);
  if (P::kPath == Path::i4) ws.quantized = carver.take<std::int8_t>(depth);
  return ws;
}

// Panels of a step: those from `first` on that exist.
struct Panels {
  std::int64_t first;
  int count;
};

// Scales and zero points of a step's columns, transposed to what kernels read.
template <class P>
void load_scales(const Weights& w, Panels panels, Workspace& ws) {
  const std::int64_t groups = P::groups(w.depth);
  for (int p = 0; p < kPanels; ++p) {
    const std::int64_t panel = panels.first + (p < panels.count ? p : 0);
    if constexpr (P::kGrouped) {
      transpose_columns(w.scale, w.columns, groups, panel, ws.scale + p * kPanel, kStepColumns);
    }
    if constexpr (P::kHasZero) {
      transpose_columns(w.zero, w.columns, groups, panel, ws.zero + p * kPanel, kStepColumns);
    }
  }
}

// Where the blocks of a step's first panel are, ready to multiply, and how far the next's.
struct Blocks {
  const std::byte* data;
  std::int64_t panel_stride;
};

// Blocks [first, last) of K of a step. A missing second panel is the first again: its sums are
// never read.
template <class P>
Blocks load_blocks(const Weights& w, Panels panels, std::int64_t first, std::int64_t last, Workspace& ws) {
  const std::int64_t depth_bytes = P::blocks(w.depth) * kBlockBytes;
  const std::int64_t range_bytes = P::range_blocks(w.depth) * kBlockBytes;
  Blocks blocks{w.data + panels.first * depth_bytes + first * kBlockBytes, panels.count > 1 ? depth_bytes : 0};
  if constexpr (P::kLayout == Layout::row_major) {
    for (int p = 0; p < panels.count; ++p) {
      gather_blocks<P>(w, panels.first + p, first, last, ws.gathered + p * range_bytes);
    }
    blocks = {ws.gathered, panels.count > 1 ? range_bytes : 0};
  }
  if constexpr (P::kExpands) {
    for (int p = 0; p < panels.count; ++p) {
      expand_blocks<P>(blocks.data + p * blocks.panel_stride, first, last, P::group_blocks(w.depth),
                       ws.zero + p * kPanel, kStepColumns, ws.expanded + p * range_bytes * P::kExpansion);
    }
    blocks = {ws.expanded, panels.count > 1 ? range_bytes * P::kExpansion : 0};
  }
  return blocks;
}

// Sums before the first product: zero, less what the offset of unsigned int8 weights will add.
template <class P>
void start_totals(const PackedRows& x, float* totals) {
  for (std::int64_t row = 0; row < x.tiles * x.height; ++row) {
    const std::int32_t start = P::kPath == Path::i8 ? x.sum[row] * -128 : 0;
    for (int p = 0; p < kPanels; ++p) {
      store(reinterpret_cast<std::int32_t*>(totals + row * kStepColumns + p * kPanel), splat(start));
    }
  }
}

// All tiles times blocks [first, last) of K of a step.
template <class P>
void multiply_range(const PackedRows& x, const Blocks& blocks, std::int64_t first, std::int64_t last, Workspace& ws) {
  const auto kernel = kernel_for<P>(x.height);
  const std::int64_t group_blocks = P::group_blocks(x.depth);
  const std::int64_t group = P::kGrouped ? first / group_blocks : 0;
  for (std::int64_t t = 0; t < x.tiles; ++t) {
    const PackedRows tile = from_tile<P>(x, t);
    kernel(Step{
        .totals = ws.totals + t * x.height * kStepColumns,
        .x = tile.cells + first * P::kCellsPerBlock * x.height,
        .w = blocks.data,
        .panel_stride = blocks.panel_stride,
        .cells = (last - first) * P::kCellsPerBlock,
        .group_cells = group_blocks * P::kCellsPerBlock,
        .w_scale = P::kGrouped ? ws.scale + group * kStepColumns : nullptr,
        .w_zero = P::kHasZero ? ws.zero + group * kStepColumns : nullptr,
        .x_scale = P::kPath == Path::i4 ? tile.scale + group * x.height : nullptr,
        .x_sum = P::kPath == Path::i4 ? tile.sum + group * x.height : nullptr,
    });
  }
}

// Multiplies all rows with the columns of panels [begin, end) and calls
// epilogue(row, first column, number of columns, sums) for every row and panel. Sums are exact
// integers' floats for Path::i8 and scaled already when P::kGrouped.
template <class P, class Epilogue>
void multiply_panels(const PackedRows& x, const Weights& w, std::int64_t begin, std::int64_t end, Workspace ws,
                     Epilogue&& epilogue) {
  const std::int64_t blocks = P::blocks(w.depth), range = P::range_blocks(w.depth);
  for (std::int64_t panel = begin; panel < end; panel += kPanels) {
    const Panels panels{panel, static_cast<int>(end - panel < kPanels ? end - panel : kPanels)};
    load_scales<P>(w, panels, ws);
    start_totals<P>(x, ws.totals);
    for (std::int64_t first = 0; first < blocks; first += range) {
      const std::int64_t last = first + range < blocks ? first + range : blocks;
      multiply_range<P>(x, load_blocks<P>(w, panels, first, last, ws), first, last, ws);
    }
    for (std::int64_t row = 0; row < x.rows; ++row) {
      for (int p = 0; p < panels.count; ++p) {
        float* sums = ws.totals + row * kStepColumns + p * kPanel;
        if constexpr (P::kPath == Path::i8) store(sums, to_f32(load(reinterpret_cast<std::int32_t*>(sums))));
        const std::int64_t column = (panel + p) * kPanel;
        epilogue(row, column, w.columns - column < kPanel ? w.columns - column : kPanel, sums);
      }
    }
  }
}

}  // namespace trtc::gemm
