// How a matrix product is carried out, decided from its element types at compile time.
//
// Weights are panels of 16 columns made of 64-byte blocks of 16 cells (plugins/layouts.py), or, in
// layout compact and of 6 bits, of 192-byte blocks that widen to such (plugins/compact.py).
// Activations are cut into tiles of a few rows, each a sequence of 4-byte cells, one a row, that a
// kernel broadcasts against a block. Per (row, column) there is one accumulator that walks K from
// first to last, whatever the number of rows, tiles or threads: a row's result depends on nothing
// else in the batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simd.hpp"
#include "types.hpp"

namespace trtc::gemm {

constexpr int kPanel = 16;
constexpr int kBlockBytes = 64;

// What a cell holds and how cells are multiplied.
enum class Path {
  f32,   // one float; fused multiply-add
  bf16,  // two bf16; fp32 sums of exact products (machines with vdpbf16ps)
  i8,    // int8 against unsigned bytes; one int32 sum over K
  dynamic,  // int8, rounded by row and group, against bytes or nibbles; an int32 sum a group
};

// k a cell covers. Where products of bytes are made of words, a cell has two bytes widened to them.
constexpr int cell_depth(Path path, DType weight) {
  if (path == Path::f32) return 1;
  const bool words = path == Path::bf16 || (kBytesAreWords && weight == DType::i8);
  return words ? 2 : 4;
}

// k a block of packed weights covers.
constexpr int block_depth(DType weight) {
  switch (weight) {
    case DType::f32: return 1;
    case DType::bf16: return 2;
    case DType::f4e2m1:
    case DType::i4:
    case DType::u4:
    case DType::iq4: return 8;
    case DType::i6: return 16;
    default: return 4;
  }
}

// Where in its cell the i-th k of a block of 1-byte or 4-bit weights is, in bits.
constexpr int kByteOrder[] = {0, 2, 1, 3};
constexpr int cell_shift(int i) { return 8 * kByteOrder[i % 4] + 4 * (i / 4); }

// What packed codes of 6 bits are more than their values. They have 7 bits, as bytes of iq4.
constexpr int kSixOffset = 32;

// What bytes made of both nibbles of layout planes are more than their values: 8 more in each nibble.
constexpr int kPlanesOffset = 16 * 8 + 8;

// The high bytes of bf16 numbers that the nibbles of layout compact stand for.
alignas(16) constexpr std::uint8_t kCompactHighBytes[16] = {0x00, 0x39, 0x3a, 0x3b, 0x3c, 0x3d, 0x3e, 0x3f,
                                                            0x80, 0xb9, 0xba, 0xbb, 0xbc, 0xbd, 0xbe, 0xbf};

// The numbers that E2M1 codes stand for.
constexpr float kE2m1Values[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                   -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// The integers that codes stand for: those of iq4 (plugins/iq4.py), and twice those of E2M1.
constexpr int kIq4Values[16] = {-69, -57, -44, -34, -25, -18, -11, -5, 1, 7, 13, 20, 27, 35, 44, 56};
constexpr auto kDoubledE2m1 = [] {
  std::array<int, 16> values{};
  for (int i = 0; i < 16; ++i) values[i] = static_cast<int>(2 * kE2m1Values[i]);
  return values;
}();

constexpr bool has_codebook(DType weight) { return weight == DType::iq4 || weight == DType::f4e2m1; }

template <DType kWeight>
constexpr int code_value(int code) {
  static_assert(has_codebook(kWeight));
  return kWeight == DType::iq4 ? kIq4Values[code] : kDoubledE2m1[code];
}

// Minus the least of them, and how much more each is, as unsigned bytes: 7 bits, whose products with
// int8 pairs of words have room for.
template <DType kWeight>
constexpr int kCodeOffset = [] {
  int least = 0;
  for (int i = 0; i < 16; ++i) least = code_value<kWeight>(i) < least ? code_value<kWeight>(i) : least;
  return -least;
}();
template <DType kWeight>
alignas(16) constexpr auto kCodeBytes = [] {
  std::array<std::uint8_t, 16> bytes{};
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(code_value<kWeight>(i) + kCodeOffset<kWeight>);
  return bytes;
}();
static_assert(2 * (kIq4Values[15] + kCodeOffset<DType::iq4>) * 127 < 1 << 15);

// What scales of groups are stored as: floats, or bytes, which are those of plugins/iq4.py, E8M0 or E4M3.
enum class Scales { floats, iq4, e8m0, e4m3 };

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class X, DType kWeight, Multiply kMultiply>
constexpr Path path_of() {
  if (kMultiply == Multiply::dynamic_i8) return Path::dynamic;
  if (std::is_same_v<X, std::int8_t>) return Path::i8;
#ifdef TRTC_AVX512
  if (!std::is_same_v<X, float>) return Path::bf16;
#endif
  return Path::f32;
}

// Rows a tile and panels a step: as many sums as the registers hold beside the operands. Few rows
// take more panels at a time, because a sum waits several cycles for its last addition.
#if defined(TRTC_AVX512)
constexpr int kPanels = 2;
constexpr int kPanelsOfFewRows = 4;
constexpr int kFewRows = 5;
constexpr int max_height(Path) { return 12; }
#elif defined(TRTC_AVX2)
constexpr int kPanels = 1;
constexpr int kPanelsOfFewRows = 2;
constexpr int kFewRows = 3;
constexpr int max_height(Path) { return 6; }
#else
constexpr int kPanels = 1;
constexpr int kPanelsOfFewRows = 1;
constexpr int kFewRows = 0;
constexpr int max_height(Path) { return 4; }
#endif
constexpr int kMostPanels = kPanelsOfFewRows;

// Everything about a product but its extents.
//   X           element type of the activations as they are packed
//   kGroup      input channels that share a weight scale; 0: all
//   kHasZero    weights have zero points (u4 only)
//   kScales     what scales of groups are stored as
template <class X_, DType kWeight_, Multiply kMultiply, std::int64_t kGroup_, bool kHasZero_, Layout kLayout_,
          Scales kScales_ = Scales::floats>
struct Product {
  using X = X_;
  static constexpr DType kWeight = kWeight_;
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kHasZero = kHasZero_;
  static constexpr Scales kScales = kScales_;
  static constexpr bool kByteScales = kScales != Scales::floats;
  static constexpr Path kPath = path_of<X, kWeight, kMultiply>();
  static constexpr std::int64_t kGroup = kGroup_;
  // Whether sums are scaled group by group inside the kernel.
  static constexpr bool kGrouped = kPath == Path::dynamic || kGroup > 0;
  static constexpr bool kPlanes = kLayout == Layout::planes;
  static constexpr bool kCompact = kLayout == Layout::compact;
  static constexpr int kBlockDepth = kPlanes || kCompact ? 8 : block_depth(kWeight);
  // As it is stored.
  static constexpr int kStoredBytes = kCompact || kWeight == DType::i6 ? 3 * kBlockBytes : kBlockBytes;
  // Blocks that a block of weights widens to before it is multiplied.
  static constexpr int kCellDepth = cell_depth(kPath, kWeight);
  static constexpr bool kHasSmallBytes = has_codebook(kWeight) || kWeight == DType::i6;
  static constexpr bool kMultipliesAsStored = kPath == Path::i8 || (kPath == Path::dynamic && !kHasSmallBytes);
  static constexpr int kExpansion = kMultipliesAsStored ? 1 : kBlockDepth / kCellDepth;
  static constexpr bool kExpands = kExpansion > 1;
  static constexpr int kCellsPerBlock = kBlockDepth / kCellDepth;
  static constexpr int kMaxHeight = max_height(kPath);
  // Of a scale of a group, as kernels read it: bytes are widened once, but for dynamic products.
  static constexpr bool kWidensScales = kByteScales && kPath != Path::dynamic;
  static constexpr int kScaleBytes = kByteScales && !kWidensScales ? 1 : 4;
  // Times the sum of a row's int8: what unsigned codes of weights have too little, to start a sum
  // with; with zero points, what is to be multiplied with those first.
  static constexpr std::int32_t kSumOffset = kHasZero                 ? -1
                                             : kPlanes                ? -kPlanesOffset
                                             : kWeight == DType::i8 ? -128
                                             : kWeight == DType::i4 ? -8
                                             : kWeight == DType::i6 ? -kSixOffset
                                             : kWeight == DType::iq4 ? -kCodeOffset<DType::iq4>
                                             : kWeight == DType::f4e2m1 ? -kCodeOffset<DType::f4e2m1>
                                                                    : 0;
  // What sums are multiplied with at the end: E4M3 widens to bf16 most cheaply with a smaller exponent,
  // and the integers of E2M1 codes are doubled.
  static constexpr float kSumScale = kWeight == DType::f8e4m3 && kPath == Path::bf16      ? 0x1p8f
                                     : kWeight == DType::f4e2m1 && kPath == Path::dynamic ? 0.5f
                                                                                          : 1.f;

  static_assert(kGroup % kBlockDepth == 0, "a group is a whole number of blocks");
  static_assert(kPath != Path::i8 || (kWeight == DType::i8 && kGroup == 0), "int8 activations need int8 weights");
  static_assert(kPath != Path::dynamic || kBlockDepth >= 8 || kWeight == DType::i8, "dynamic_i8 is for integers");
  static_assert(kWeight != DType::i6 || kLayout == Layout::packed, "6-bit weights are packed");
  static_assert(!kPlanes || (kPath == Path::dynamic && kWeight == DType::i8), "planes are of int8 by int8");
  static_assert(!kCompact || (kWeight == DType::bf16 && !kGrouped), "compact are bf16, with a scale a column");
  static_assert(!kByteScales || kGroup > 0, "byte scales are of groups");
  static_assert(!kByteScales || kWeight == (kScales == Scales::iq4 ? DType::iq4 : DType::f4e2m1), "of their own codes");
  static_assert(!kHasZero || kWeight == DType::u4, "only u4 weights have zero points");

  static constexpr std::int64_t blocks(std::int64_t depth) { return ceil_div(depth, kBlockDepth); }
  static constexpr std::int64_t cells(std::int64_t depth) { return blocks(depth) * kCellsPerBlock; }
  static constexpr std::int64_t groups(std::int64_t depth) { return kGroup > 0 ? ceil_div(depth, kGroup) : 1; }
  static constexpr std::int64_t group_blocks(std::int64_t depth) {
    return kGroup > 0 ? kGroup / kBlockDepth : blocks(depth);
  }
  // Of layout planes: of each.
  static constexpr std::int64_t packed_bytes(std::int64_t columns, std::int64_t depth) {
    return ceil_div(columns, kPanel) * blocks(depth) * kStoredBytes;
  }
  // Blocks of a panel that are multiplied at a time: what stays in the first-level cache while all
  // tiles pass. Whole groups only.
  static constexpr std::int64_t range_blocks(std::int64_t depth) {
    const std::int64_t fits = 128 / kExpansion / (kPlanes ? 2 : 1);
    if (!kGrouped) return fits;
    const std::int64_t group = group_blocks(depth);
    return fits > group ? fits / group * group : group;
  }
  // Blocks between what few rows multiply and what they fetch: of four panels a few kilobytes, the
  // latency of memory at its full speed. Whole groups.
  static constexpr std::int64_t ahead_blocks(std::int64_t depth) {
    constexpr std::int64_t kAhead = kPlanes ? 16 : kStoredBytes > kBlockBytes ? 12 : 32;
    if (!kGrouped) return kAhead;
    const std::int64_t group = group_blocks(depth);
    return kAhead > group ? kAhead / group * group : group;
  }
};

}  // namespace trtc::gemm
