// Activations on their way into a kernel: rows converted, quantised and cut into tiles of cells.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "context.hpp"
#include "gemm_format.hpp"
#include "vector.hpp"

namespace trtc::gemm {

// Rows a tile may have. Few enough that a kernel for each compiles quickly.
constexpr int kHeights[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12};

// Rows of a call are handled in chunks that keep the second-level cache: weights are read again
// for each, activations and sums for each panel.
constexpr std::int64_t kChunkTiles = 20;

// How many rows go in a tile, and tiles in a chunk.
struct Tiling {
  int height;
  std::int64_t tiles;
  std::int64_t chunk_tiles;
};

// Tiles as even as possible: 16 rows are 8 + 8, not 12 + 4.
template <class P>
Tiling tile_rows(std::int64_t rows) {
  const std::int64_t fewest = ceil_div(rows, P::kMaxHeight);
  const std::int64_t even = ceil_div(rows, fewest);
  int height = 0;
  for (const int candidate : kHeights) {
    if (height < even) height = candidate;
  }
  if (height > P::kMaxHeight) height = P::kMaxHeight;
  const std::int64_t tiles = ceil_div(rows, height);
  return {height, tiles, ceil_div(tiles, ceil_div(tiles, kChunkTiles))};
}

// The most rows of a chunk, padding of the last tile included.
template <class P>
std::int64_t max_chunk_rows(std::int64_t max_rows) {
  const std::int64_t tiles = ceil_div(max_rows, P::kMaxHeight);
  return (tiles < kChunkTiles ? tiles : kChunkTiles) * P::kMaxHeight;
}

// Some tiles of activations, ready to multiply.
struct PackedRows {
  std::uint32_t* cells;  // [tiles][cells of K][height]
  float* scale;          // Path::dynamic: [tiles][groups][height], what one unit of the int8 is worth
  std::int32_t* offset;  // like scale (Path::i8: one group): what sums start with
  std::int64_t rows;
  std::int64_t depth;
  int height;
  std::int64_t tiles;
};

template <class P>
PackedRows carve_rows(Carver& carver, std::int64_t padded_rows, std::int64_t depth) {
  constexpr bool kSums = P::kPath == Path::i8 || P::kPath == Path::dynamic;
  PackedRows rows{};
  rows.depth = depth;
  rows.cells = carver.take<std::uint32_t>(padded_rows * P::cells(depth));
  if (P::kPath == Path::dynamic) rows.scale = carver.take<float>(padded_rows * P::groups(depth));
  if (kSums) rows.offset = carver.take<std::int32_t>(padded_rows * P::groups(depth));
  return rows;
}

// The memory that is left after `skipped` rows, those that pad tiles included.
template <class P>
PackedRows skip_rows(PackedRows rows, std::int64_t skipped) {
  rows.cells += skipped * P::cells(rows.depth);
  if (rows.scale != nullptr) rows.scale += skipped * P::groups(rows.depth);
  if (rows.offset != nullptr) rows.offset += skipped * P::groups(rows.depth);
  return rows;
}

// The rows from tile `first` on.
template <class P>
PackedRows from_tile(const PackedRows& rows, std::int64_t first) {
  PackedRows rest = skip_rows<P>(rows, first * rows.height);
  rest.rows -= first * rows.height;
  rest.tiles -= first;
  return rest;
}

// bf16 of every E4M3 code; all are exact.
constexpr std::array<std::uint16_t, 256> make_f8e4m3_table() {
  std::array<std::uint16_t, 256> table{};
  for (int code = 0; code < 256; ++code) {
    const std::uint32_t magnitude = code & 0x7f, sign = (code & 0x80) << 8;
    std::uint32_t bits = (magnitude << 4) + (120 << 7);
    if (magnitude == 0x7f) bits = 0x7fc0;
    if (magnitude < 8) {
      // m * 2^-9: shift the leading one of m out of the mantissa.
      const int leading = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
      bits = magnitude == 0 ? 0 : ((127 - 9 + leading) << 7) | ((magnitude << (7 - leading)) & 0x7f);
    }
    table[code] = static_cast<std::uint16_t>(bits | sign);
  }
  return table;
}
inline constexpr std::array<std::uint16_t, 256> kF8e4m3ToBf16 = make_f8e4m3_table();

inline std::uint32_t exact_bf16(bf16 x) { return x.bits; }
inline std::uint32_t exact_bf16(f8e4m3 x) { return kF8e4m3ToBf16[x.bits]; }

// The word of an int8.
inline std::uint32_t exact_word(std::int8_t x) { return static_cast<std::uint16_t>(x); }

// The cell of x[0..valid), valid at most the cell's depth.
template <class P, class X>
TRTC_INLINE std::uint32_t make_cell(const X* x, std::int64_t valid) {
  if constexpr (P::kPath == Path::f32) {
    if constexpr (std::is_same_v<X, float>) return std::bit_cast<std::uint32_t>(*x);
    if constexpr (!std::is_same_v<X, float>) return exact_bf16(*x) << 16;
  } else if constexpr (P::kPath == Path::bf16) {
    return exact_bf16(x[0]) | (valid > 1 ? exact_bf16(x[1]) << 16 : 0);
  } else if constexpr (P::kCellDepth == 2) {
    return exact_word(x[0]) | (valid > 1 ? exact_word(x[1]) << 16 : 0);
  } else {
    std::uint32_t cell = 0;
    std::memcpy(&cell, x, static_cast<std::size_t>(valid < 4 ? valid : 4));
    // Weights have the middle bytes of every four swapped.
    return (cell & 0xff0000ffu) | ((cell & 0xff00u) << 8) | ((cell >> 8) & 0xff00u);
  }
}

// One row's cells, `stride` apart, zeros after the last.
template <class P, class X>
void write_cells(const X* x, std::int64_t depth, std::int64_t stride, std::uint32_t* out) {
  constexpr int kDepth = P::kCellDepth;
  const std::int64_t whole = depth / kDepth;
  for (std::int64_t i = 0; i < whole; ++i) out[i * stride] = make_cell<P>(x + i * kDepth, kDepth);
  std::int64_t written = whole;
  if (whole * kDepth < depth) out[written++ * stride] = make_cell<P>(x + whole * kDepth, depth - whole * kDepth);
  for (; written < P::cells(depth); ++written) out[written * stride] = 0;
}

// count values to int8 by their largest magnitude: out = round(x * 127 / largest). Returns the worth
// of one unit.
template <class X>
float quantize_group(const X* x, std::int64_t count, std::int8_t* out) {
  Floats lanes{};
  for_vectors(count, [&](std::int64_t i, auto n) {
    lanes = trtc::max(lanes, as_floats(bits_of(trtc::load(x + i, n)) & 0x7fffffffu));
  });
  const float amax = largest(lanes);
  // Below 2^-100 the inverse could overflow, and such a group adds nothing to a float sum.
  const float inverse = amax > 0x1p-100f ? 127.f / amax : 0.f;
  for_vectors(count, [&](std::int64_t i, auto n) { trtc::store(out + i, trtc::load(x + i, n) * inverse, n); });
  return inverse > 0.f ? amax / 127.f : 0.f;
}

inline std::int32_t sum_of(const std::int8_t* x, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

// Packs row r of a tile. quantized: depth bytes for Path::dynamic.
template <class P>
void pack_row(const PackedRows& tile, int r, const typename P::X* x, std::int8_t* quantized) {
  const std::int64_t depth = tile.depth;
  if constexpr (P::kPath == Path::dynamic) {
    const std::int64_t groups = P::groups(depth), width = P::kGroup > 0 ? P::kGroup : depth;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t first = g * width, last = first + width < depth ? first + width : depth;
      tile.scale[g * tile.height + r] = quantize_group(x + first, last - first, quantized + first);
      tile.offset[g * tile.height + r] = P::kSumOffset * sum_of(quantized + first, last - first);
    }
    write_cells<P>(quantized, depth, tile.height, tile.cells + r);
  } else {
    if constexpr (P::kPath == Path::i8) tile.offset[r] = P::kSumOffset * sum_of(x, depth);
    write_cells<P>(x, depth, tile.height, tile.cells + r);
  }
}

// A row that is not there: zeros, which no one reads the product of.
template <class P>
void pack_missing_row(const PackedRows& tile, int r) {
  const std::int64_t groups = P::groups(tile.depth);
  for (std::int64_t i = 0; i < P::cells(tile.depth); ++i) tile.cells[i * tile.height + r] = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    if (tile.scale != nullptr) tile.scale[g * tile.height + r] = 0.f;
    if (tile.offset != nullptr) tile.offset[g * tile.height + r] = 0;
  }
}

// Packs tile number `index`; row_of(i) gives the i-th row.
template <class P, class RowOf>
void pack_tile(const PackedRows& rows, std::int64_t index, std::int8_t* quantized, RowOf&& row_of) {
  const PackedRows tile = from_tile<P>(rows, index);
  for (int r = 0; r < rows.height; ++r) {
    if (r < tile.rows) {
      pack_row<P>(tile, r, row_of(index * rows.height + r), quantized);
    } else {
      pack_missing_row<P>(tile, r);
    }
  }
}

}  // namespace trtc::gemm
