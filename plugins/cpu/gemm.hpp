// GEMM of activations and packed weights, for linear layers and experts.
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

// A thread's own memory. P is the number of panels of a step.
struct Workspace {
  float* totals;              // [padded rows][P][16]
  std::byte* gathered;        // [P][range] blocks, for row-major weights
  std::byte* expanded;        // [P][range * kExpansion] blocks, for quantised weights
  std::byte* scale;           // [P][groups][16], where they are not stored like that
  std::uint8_t* scale_codes;  // [groups][16], before they are widened
  std::int32_t* zero;         // [P][groups][16]
  std::int8_t* quantized;     // a row, while it is packed
};

template <class Of>
Workspace carve_workspace(Carver& carver, std::int64_t padded_rows, std::int64_t depth) {
  const std::int64_t blocks = Of::range_blocks(depth) * kMostPanels;
  const std::int64_t few = kFewRows * kMostPanels, many = padded_rows * kPanels;
  const std::int64_t scales = Of::groups(depth) * kMostPanels * kPanel;
  Workspace ws{};
  ws.totals = carver.take<float>((few > many ? few : many) * kPanel);
  if (Of::kLayout == Layout::row_major) ws.gathered = carver.take<std::byte>(blocks * kBlockBytes);
  if (Of::kExpands) ws.expanded = carver.take<std::byte>(blocks * kBlockBytes * Of::kExpansion);
  if (Of::kGrouped) ws.scale = carver.take<std::byte>(scales * Of::kScaleBytes);
  if (Of::kWidensScales) ws.scale_codes = carver.take<std::uint8_t>(Of::groups(depth) * kPanel);
  if (Of::kHasZero) ws.zero = carver.take<std::int32_t>(scales);
  if (Of::kPath == Path::dynamic) ws.quantized = carver.take<std::int8_t>(depth);
  return ws;
}

// Blocks that are ready to multiply: those of the first panel, and the stride to the next panel's.
struct Blocks {
  const std::byte* data;
  std::int64_t panel_stride;
};

// All rows times P panels from `first_panel` on, of which `count` exist. When fewer do, the first
// stands in for the others (P is 2 then), and those sums are never read.
template <class Of, int P>
class PanelStep {
 public:
  // `end`: of the panels that this thread goes on with.
  PanelStep(const PackedRows& x, const Weights& w, const Workspace& ws, std::int64_t first_panel, std::int64_t end)
      : x_(x),
        w_(w),
        ws_(ws),
        first_panel_(first_panel),
        end_(end),
        count_(static_cast<int>(end - first_panel < P ? end - first_panel : P)),
        kernel_(kernel_for<Of, P>(x.height)) {}

  // Leaves the sums in the workspace.
  void run() {
    load_scales();
    start_totals();
    const std::int64_t blocks = Of::blocks(w_.depth);
    if constexpr (kFromMemory) {
      // Prefetches run ahead; those of the last blocks are for the first blocks of the next step.
      const std::int64_t ahead = Of::ahead_blocks(w_.depth);
      const std::int64_t last = blocks > ahead ? ceil_div(blocks - ahead, ahead) * ahead : 0;
      if (last > 0) multiply_range(load_blocks(0, last), 0, last, ahead);
      multiply_range(load_blocks(last, blocks), last, blocks, blocks);
    } else {
      const std::int64_t range = Of::range_blocks(w_.depth);
      for (std::int64_t first = 0; first < blocks; first += range) {
        const std::int64_t last = first + range < blocks ? first + range : blocks;
        multiply_range(load_blocks(first, last), first, last, last);
      }
    }
  }

  // Calls epilogue(row, first column, number of columns, sums) for every row and panel.
  template <class Epilogue>
  void finish(Epilogue&& epilogue) {
    for (std::int64_t row = 0; row < x_.rows; ++row) {
      for (int p = 0; p < count_; ++p) {
        float* sums = ws_.totals + (row * P + p) * kPanel;
        if constexpr (Of::kPath == Path::i8) store(sums, to_f32(load(reinterpret_cast<std::int32_t*>(sums))));
        if constexpr (Of::kSumScale != 1.f) store(sums, multiply(load(sums), splat(Of::kSumScale)));
        const std::int64_t column = (first_panel_ + p) * kPanel;
        epilogue(row, column, w_.columns - column < kPanel ? w_.columns - column : kPanel, sums);
      }
    }
  }

 private:
  // Whether kernels take the weights from where they are stored, and only once.
  static constexpr bool kFromMemory =
      kStreams<P> && Of::kLayout != Layout::row_major && (!Of::kExpands || kWidensInRegisters<Of, P>);

  // Finds scales and zero points of the columns, as kernels read them.
  void load_scales() {
    const std::int64_t groups = Of::groups(w_.depth);
    for (int p = 0; p < P; ++p) {
      const std::int64_t panel = first_panel_ + (p < count_ ? p : 0), place = p * groups * kPanel;
      if constexpr (Of::kWidensScales) {
        std::byte* const own = ws_.scale + place * Of::kScaleBytes;
        load_columns<Of::kLayout>(w_.scale_codes, w_.columns, groups, panel, ws_.scale_codes);
        widen_byte_scales<Of::kScales>(ws_.scale_codes, groups, reinterpret_cast<float*>(own));
        scale_[p] = ahead_scale_[p] = own;
      } else if constexpr (Of::kByteScales) {
        find_scales(p, panel, w_.scale_codes);
      } else if constexpr (Of::kGrouped) {
        find_scales(p, panel, w_.scale);
      }
      if constexpr (Of::kHasZero) {
        load_columns<Of::kLayout>(w_.zero, w_.columns, groups, panel, ws_.zero + place);
      }
    }
  }

  // Where a panel's scales are: where they are stored, if they lie there as kernels read them.
  template <class Scale>
  void find_scales(int p, std::int64_t panel, const Scale* stored) {
    const std::int64_t groups = Of::groups(w_.depth), size = groups * kPanel;
    const auto place_of = [&](std::int64_t of) { return reinterpret_cast<const std::byte*>(stored + of * size); };
    const bool is_ready = Of::kLayout != Layout::row_major && (panel + 1) * kPanel <= w_.columns;
    auto* own = reinterpret_cast<Scale*>(ws_.scale) + p * size;
    if (!is_ready) load_columns<Of::kLayout>(stored, w_.columns, groups, panel, own);
    scale_[p] = is_ready ? place_of(panel) : reinterpret_cast<const std::byte*>(own);
    ahead_scale_[p] = panel + P < end_ ? place_of(panel + P) : scale_[p];
  }

  // Zero, less what the offset of unsigned int8 weights will add.
  void start_totals() {
    for (std::int64_t row = 0; row < x_.tiles * x_.height; ++row) {
      const std::int32_t start = Of::kPath == Path::i8 ? x_.offset[row] : 0;
      auto* totals = reinterpret_cast<std::int32_t*>(ws_.totals + row * P * kPanel);
      for (int p = 0; p < P; ++p) store(totals + p * kPanel, splat(start));
    }
  }

  // Where stored block `block` of panel p is. Past the last block the next step's panel begins.
  const std::byte* stored(int p, std::int64_t block) const {
    const std::int64_t blocks = Of::blocks(w_.depth);
    std::int64_t panel = first_panel_ + p;
    if (block >= blocks) panel += P, block = 0;
    return w_.data + ((panel < end_ ? panel : first_panel_) * blocks + block) * Of::kStoredBytes;
  }

  // Blocks [first, last) of K.
  Blocks load_blocks(std::int64_t first, std::int64_t last) {
    const std::int64_t depth_bytes = Of::blocks(w_.depth) * Of::kStoredBytes;
    const std::int64_t range_bytes = Of::range_blocks(w_.depth) * kBlockBytes;
    const bool single = count_ < P;
    Blocks blocks{w_.data + first_panel_ * depth_bytes + first * Of::kStoredBytes, single ? 0 : depth_bytes};
    if constexpr (Of::kLayout == Layout::row_major) {
      for (int p = 0; p < count_; ++p) {
        gather_blocks<Of>(w_, first_panel_ + p, first, last, ws_.gathered + p * range_bytes);
      }
      blocks = {ws_.gathered, single ? 0 : range_bytes};
    }
    if constexpr (Of::kExpands && !kWidensInRegisters<Of, P>) {
      for (int p = 0; p < count_; ++p) {
        expand_blocks<Of>(blocks.data + p * blocks.panel_stride, first, last, Of::group_blocks(w_.depth),
                          Of::kHasZero ? ws_.zero + p * Of::groups(w_.depth) * kPanel : nullptr,
                          ws_.expanded + p * range_bytes * Of::kExpansion);
      }
      blocks = {ws_.expanded, single ? 0 : range_bytes * Of::kExpansion};
    }
    return blocks;
  }

  // All tiles times blocks [first, last) of K. ahead: block that will be needed next but here already.
  void multiply_range(const Blocks& blocks, std::int64_t first, std::int64_t last, std::int64_t ahead) {
    const std::int64_t group_blocks = Of::group_blocks(x_.depth);
    const std::int64_t group = Of::kGrouped ? first / group_blocks : 0;
    for (std::int64_t t = 0; t < x_.tiles; ++t) {
      const PackedRows tile = from_tile<Of>(x_, t);
      Step<P> step{
          .totals = ws_.totals + t * x_.height * P * kPanel,
          .x = tile.cells + first * Of::kCellsPerBlock * x_.height,
          .w = blocks.data,
          .panel_stride = blocks.panel_stride,
          .fine = Of::packed_bytes(w_.columns, w_.depth),
          .ahead = {},
          .cells = (last - first) * Of::kCellsPerBlock,
          .group_cells = group_blocks * Of::kCellsPerBlock,
          .w_scale = {},
          .ahead_scale = {},
          .w_zero = Of::kHasZero ? ws_.zero + group * kPanel : nullptr,
          .zero_stride = Of::groups(w_.depth) * kPanel,
          .x_scale = Of::kPath == Path::dynamic ? tile.scale + group * x_.height : nullptr,
          .x_offset = Of::kPath == Path::dynamic ? tile.offset + group * x_.height : nullptr,
      };
      // The first tiles share the work of fetching the next range; what is here already costs nothing.
      for (int p = 0; p < P; ++p) {
        const bool fetches = Of::kLayout != Layout::row_major && (x_.tiles == 1 || t == p);
        constexpr std::int64_t kBytes = kPanel * Of::kScaleBytes;
        step.w_scale[p] = Of::kGrouped ? scale_[p] + group * kBytes : nullptr;
        step.ahead_scale[p] = Of::kGrouped ? ahead_scale_[p] + group * kBytes : nullptr;
        step.ahead[p] = fetches ? stored(p, ahead) : blocks.data;
      }
      kernel_(step);
    }
  }

  const PackedRows& x_;
  const Weights& w_;
  const Workspace& ws_;
  std::int64_t first_panel_;
  std::int64_t end_;
  int count_;
  const std::byte* scale_[P];        // [groups][16]
  const std::byte* ahead_scale_[P];  // of the next step's panels
  void (*kernel_)(const Step<P>&);
};

// Steps of P panels as long as there are P, or to the end when P is the least there is.
template <class Of, int P, class Epilogue>
std::int64_t multiply_steps(const PackedRows& x, const Weights& w, std::int64_t begin, std::int64_t end,
                            const Workspace& ws, Epilogue&& epilogue) {
  std::int64_t panel = begin;
  for (; panel < end && (P == kPanels || panel + P <= end); panel += P) {
    PanelStep<Of, P> step(x, w, ws, panel, end);
    step.run();
    step.finish(epilogue);
  }
  return panel;
}

// Multiplies all rows with the columns of panels [begin, end) and calls
// epilogue(row, first column, number of columns, sums) for every row and panel. Sums are exact
// integers' floats for Path::i8, and scaled already when Of::kGrouped.
template <class Of, class Epilogue>
void multiply_panels(const PackedRows& x, const Weights& w, std::int64_t begin, std::int64_t end, const Workspace& ws,
                     Epilogue&& epilogue) {
  if constexpr (kPanelsOfFewRows > kPanels) {
    if (x.tiles == 1 && x.height <= kFewRows) {
      begin = multiply_steps<Of, kPanelsOfFewRows>(x, w, begin, end, ws, epilogue);
    }
  }
  multiply_steps<Of, kPanels>(x, w, begin, end, ws, epilogue);
}

}  // namespace trtc::gemm
