// The innermost loops: a tile of rows times a step of panels, sums kept in registers.
#pragma once

#include <iterator>
#include <type_traits>
#include <utility>

#include "gemm_format.hpp"
#include "gemm_rows.hpp"
#include "gemm_weights.hpp"

namespace trtc::gemm {

// One kernel call: P panels by a range of K, whole groups of it when sums are scaled by group.
template <int P>
struct Step {
  float* totals;                 // [R][P][16], added to; the bits of int32 for Path::i8
  const std::uint32_t* x;        // [cells][R]
  const std::byte* w;            // blocks of the first panel
  std::int64_t panel_stride;     // bytes from one panel's blocks to the next's
  std::int64_t fine;             // bytes from a block of layout planes to the one of the other plane
  const std::byte* ahead[P];     // for each panel: where as many blocks are that will be needed later
  std::int64_t cells;            // of the range
  std::int64_t group_cells;      // of a group; the last may have fewer
  const std::byte* w_scale[P];      // [groups][16], floats or, for DynamicKernel, bytes
  const std::byte* ahead_scale[P];  // those that the next step will need
  const std::int32_t* w_zero;    // [groups][16], of the first panel
  std::int64_t zero_stride;      // elements from one panel's zero points to the next's
  const float* x_scale;          // [groups][R]
  const std::int32_t* x_offset;  // [groups][R]
};

TRTC_INLINE const float* float_scales(const std::byte* scales) { return reinterpret_cast<const float*>(scales); }

// Whether steps of P panels are for few rows, which multiply about as fast as weights arrive.
template <int P>
constexpr bool kStreams = P > kPanels;

// Calls f(r, p) for every row and panel of a tile, unrolled so that sums live in registers.
template <int R, int P, class F>
TRTC_INLINE void each_sum(F&& f) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) f(r, p);
  }
}

// Calls body(group, first cell, cells) for each group of a step.
template <int P, class F>
TRTC_INLINE void each_group(const Step<P>& s, F&& body) {
  std::int64_t group = 0;
  for (std::int64_t begin = 0; begin < s.cells; begin += s.group_cells, ++group) {
    const std::int64_t left = s.cells - begin;
    body(group, begin, left < s.group_cells ? left : s.group_cells);
  }
}

// Adds floating-point products to the totals: multiply(sums, group, first cell, cells) adds those of
// a group, or of the whole range when sums are not scaled by group.
template <bool kGrouped, int R, int P, class Multiply>
TRTC_INLINE void add_products(const Step<P>& s, Multiply&& multiply) {
  F32x16 sums[R][P];
  if constexpr (kGrouped) {
    each_group(s, [&](std::int64_t group, std::int64_t begin, std::int64_t cells) TRTC_INLINE_LAMBDA {
      each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { sums[r][p] = zero_f32(); });
      multiply(sums, group, begin, cells);
      each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA {
        float* total = s.totals + r * P * kPanel + p * kPanel;
        store(total, multiply_add(sums[r][p], load(float_scales(s.w_scale[p]) + group * kPanel), load(total)));
      });
    });
  } else {
    each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { sums[r][p] = load(s.totals + (r * P + p) * kPanel); });
    multiply(sums, 0, 0, s.cells);
    each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { store(s.totals + (r * P + p) * kPanel, sums[r][p]); });
  }
}

// sum += the products of a block's lanes and a cell.
template <Path kPath>
TRTC_INLINE void dot_floats(F32x16& sum, I32x16 w, Cell x) {
#ifdef TRTC_AVX512
  if constexpr (kPath == Path::bf16) return dot_bf16(sum, w, x);
#endif
  return dot_f32(sum, w, x);
}

// Floating-point products of weights that are ready to multiply: as they are stored, or kExpansion
// times as large, of blocks of kStoredBytes.
template <Path kPath, bool kGrouped, int kExpansion, int kStoredBytes>
struct FloatKernel {
  template <int R, int P>
  static void run(const Step<P>& s) {
    add_products<kGrouped, R, P>(s, [&](F32x16(&sums)[R][P], std::int64_t, std::int64_t begin, std::int64_t cells)
                                        TRTC_INLINE_LAMBDA {
      const std::uint32_t* x = s.x + begin * R;
      for (std::int64_t i = begin; i < begin + cells; ++i, x += R) {
        I32x16 block[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          fetch<kStreams<P>>(s.ahead[p] + i * kStoredBytes / kExpansion);
          block[p] = load_cells(s.w + p * s.panel_stride + i * kBlockBytes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Cell cell = broadcast_cell(x + r);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) dot_floats<kPath>(sums[r][p], block[p], cell);
        }
      }
    });
  }
};

#if defined(TRTC_AVX512) || defined(TRTC_AVX2)
// The same for quantised weights that are converted in registers: few rows are one tile, which shares
// converted weights with no other, and storing them takes longer than its products. (With more rows
// there are no registers left for it.)
template <class Of>
struct WideningKernel {
  template <int R, int P>
  static void run(const Step<P>& s) {
    constexpr int n = Of::kExpansion;
    add_products<Of::kGrouped, R, P>(s, [&](F32x16(&sums)[R][P], std::int64_t group, std::int64_t begin,
                                            std::int64_t cells) TRTC_INLINE_LAMBDA {
      const std::uint32_t* x = s.x + begin * R;
      const auto zero = [&](int p) { return Of::kHasZero ? s.w_zero + p * s.zero_stride + group * kPanel : nullptr; };
      for (std::int64_t i = begin / n; i < (begin + cells) / n; ++i, x += n * R) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          const std::byte* ahead = s.ahead[p] + i * Of::kStoredBytes;
#pragma GCC unroll 3
          for (int line = 0; line < Of::kStoredBytes; line += kBlockBytes) fetch<kStreams<P>>(ahead + line);
          I32x16 wide[n];
          widen<Of>(s.w + p * s.panel_stride + i * Of::kStoredBytes, zero(p), wide);
#pragma GCC unroll 4
          for (int j = 0; j < n; ++j) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) dot_floats<Of::kPath>(sums[r][p], wide[j], broadcast_cell(x + j * R + r));
          }
        }
      }
    });
  }
};
#endif

// How a kernel finds integer weights: a block of bytes, of bytes of 7 bits, of nibbles, of nibbles that
// are codes of iq4 or E2M1, of codes of 6 bits, or of the high nibbles of bytes whose low ones are in
// another block (layout planes).
enum class Stored { bytes, small_bytes, nibbles, iq4, e2m1, six, planes };

template <class Of>
constexpr Stored kStoredAs = Of::kPlanes                    ? Stored::planes
                             : Of::kWeight == DType::iq4    ? Stored::iq4
                             : Of::kWeight == DType::f4e2m1 ? Stored::e2m1
                             : Of::kWeight == DType::i6     ? Stored::six
                             : Of::kBlockDepth == 8         ? Stored::nibbles
                                                            : Stored::bytes;

// The parts in which a block of codes is multiplied.
//   kFetched  bytes of memory that a block was made of
template <Stored kStored, int kFetched = kStored == Stored::six ? 3 * kBlockBytes : kBlockBytes>
struct Codes {
  static constexpr bool kAddsInWords = kStored == Stored::nibbles;
  // Of a block.
  static constexpr int kBytes = kStored == Stored::six ? 3 * kBlockBytes : kBlockBytes;
  static constexpr int kPartsOfBytes = kBytesAreWords ? 2 : 1;
  static constexpr bool kLooksUp = kStored == Stored::iq4 || kStored == Stored::e2m1;
  static constexpr bool kHalves = kStored == Stored::nibbles || kLooksUp;
  static constexpr int kParts = kHalves                         ? 2
                                : kStored == Stored::six         ? 4
                                : kStored == Stored::planes      ? 2 * kPartsOfBytes
                                : kStored == Stored::small_bytes ? 1
                                                                 : kPartsOfBytes;

  template <int P>
  TRTC_INLINE static void fetch_ahead(const Step<P>& s, int p, std::int64_t block) {
    const std::byte* ahead = s.ahead[p] + block * kFetched;
#pragma GCC unroll 3
    for (int line = 0; line < kFetched; line += kBlockBytes) fetch<kStreams<P>>(ahead + line);
    if constexpr (kStored == Stored::planes) fetch<kStreams<P>>(ahead + s.fine);
  }

  // Of the block at w.
  template <int part, int P>
  TRTC_INLINE static I32x16 load_part(const Step<P>& s, const std::byte* w) {
    if constexpr (kStored == Stored::six) return six_bits<part>(w);
    const I32x16 block = load_cells(w);
    if constexpr (kStored == Stored::bytes) return byte_part<part>(block);
    if constexpr (kStored == Stored::small_bytes) return block;
    if constexpr (kHalves) {
      const I32x16 nibbles = bit_and(part == 0 ? block : shift_right<4>(block), splat(0x0f0f0f0f));
      constexpr DType kCodes = kStored == Stored::iq4 ? DType::iq4 : DType::f4e2m1;
      if constexpr (kLooksUp) return look_up(nibbles, kCodeBytes<kCodes>.data());
      return nibbles;
    }
    constexpr bool kFirst = part < kPartsOfBytes;  // of the two cells that a block has of a column
    const I32x16 fine = load_cells(w + s.fine), high_nibbles = splat(static_cast<std::int32_t>(0xf0f0f0f0));
    return byte_part<part % kPartsOfBytes>(kFirst ? select_bits(high_nibbles, shift_left<4>(block), fine)
                                                  : select_bits(high_nibbles, block, shift_right<4>(fine)));
  }

  TRTC_INLINE static void dot(I32x16& sum, I32x16 part, Cell x) {
    if constexpr (kStored == Stored::nibbles) return dot_nibbles(sum, part, x);
    constexpr bool kSmall = kLooksUp || kStored == Stored::six || kStored == Stored::small_bytes;
    if constexpr (kSmall) return dot_small_bytes(sum, part, x);
    return dot_bytes(sum, part, x);
  }

  // Calls each(part) for all of them, each an integral_constant.
  template <class Each>
  TRTC_INLINE static void each_part(Each&& each) {
    each(std::integral_constant<int, 0>{});
    if constexpr (kParts > 1) each(std::integral_constant<int, 1>{});
    if constexpr (kParts > 2) each(std::integral_constant<int, 2>{});
    if constexpr (kParts > 3) each(std::integral_constant<int, 3>{});
  }
};

// Calls dot(sum, part of a block, cell) for blocks [begin, end), a cell a part and row from x on.
template <class Of, int R, int P, class Dot>
TRTC_INLINE void each_product(I32x16 (&sums)[R][P], const Step<P>& s, const std::uint32_t* x, std::int64_t begin,
                              std::int64_t end, Dot&& dot) {
  for (std::int64_t i = begin; i < end; ++i, x += Of::kParts * R) {
    const std::byte* w = s.w + i * Of::kBytes;
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) Of::fetch_ahead(s, p, i);
    // Each part is read again: a tile of sums leaves few registers.
    Of::each_part([&]<int part>(std::integral_constant<int, part>) TRTC_INLINE_LAMBDA {
      I32x16 codes[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) codes[p] = Of::template load_part<part>(s, w + p * s.panel_stride);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Cell cell = broadcast_cell(x + part * R + r);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) dot(sums[r][p], codes[p], cell);
      }
    });
  }
}

// sums += blocks [begin, end) by the cells from x on.
template <class Of, int R, int P>
TRTC_INLINE void multiply_codes(I32x16 (&sums)[R][P], const Step<P>& s, const std::uint32_t* x, std::int64_t begin,
                                std::int64_t end) {
#ifdef TRTC_AVX2
  if constexpr (Of::kAddsInWords) {
    constexpr std::int64_t kBlocks = kWordProducts / Of::kParts;
    for (; begin < end; begin += kBlocks, x += kWordProducts * R) {
      I32x16 words[R][P];
      each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { words[r][p] = splat(0); });
      each_product<Of>(words, s, x, begin, begin + kBlocks < end ? begin + kBlocks : end,
                       [](I32x16& sum, I32x16 w, Cell cell) TRTC_INLINE_LAMBDA { dot_in_words(sum, w, cell); });
      each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { add_words(sums[r][p], words[r][p]); });
    }
    return;
  }
#endif
  each_product<Of>(sums, s, x, begin, end,
                   [](I32x16& sum, I32x16 w, Cell cell) TRTC_INLINE_LAMBDA { Of::dot(sum, w, cell); });
}

// int8 by int8: totals are int32 and exact.
struct ByteKernel {
  template <int R, int P>
  static void run(const Step<P>& s) {
    auto* totals = reinterpret_cast<std::int32_t*>(s.totals);
    I32x16 sums[R][P];
    each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { sums[r][p] = load(totals + r * P * kPanel + p * kPanel); });
    using Bytes = Codes<Stored::bytes>;
    multiply_codes<Bytes>(sums, s, s.x, 0, s.cells / Bytes::kParts);
    each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA { store(totals + r * P * kPanel + p * kPanel, sums[r][p]); });
  }
};

// int8, rounded by row and group, by weights of a group: an exact int32 sum, then one multiply-add
// into the float total. Codes are unsigned: what their offset or zero points add to a sum is taken off
// first.
template <class Of, class Codes>
struct DynamicKernel {
  template <int R, int P>
  static void run(const Step<P>& s) {
    each_group(s, [&](std::int64_t group, std::int64_t begin, std::int64_t cells) TRTC_INLINE_LAMBDA {
      I32x16 sums[R][P];
      const std::int32_t* offset = s.x_offset + group * R;
      each_sum<R, P>([&](int r, int p) TRTC_INLINE_LAMBDA {
        if constexpr (Of::kHasZero) {
          const I32x16 zero = load(s.w_zero + p * s.zero_stride + group * kPanel);
          sums[r][p] = gemm::multiply(zero, splat(offset[r]));
        } else {
          sums[r][p] = splat(offset[r]);
        }
      });
      const std::uint32_t* x = s.x + begin * R;
      const std::int64_t first = begin / n, last = (begin + cells) / n - 1;
      multiply_codes<Codes>(sums, s, x, first, last);
      finish<R, P>(sums, s, x + (last - first) * n * R, last, group);
    });
  }

 private:
  static constexpr int n = Codes::kParts;  // cells of a block

  TRTC_INLINE static F32x16 scales_of(const std::byte* p) {
    if constexpr (Of::kByteScales) return widened_scales<Of::kScales>(reinterpret_cast<const std::uint8_t*>(p));
    return load(float_scales(p));
  }

  // The last block of a group, each row followed by its scaling: products go on meanwhile, where
  // scaling all sums in one go would keep them waiting.
  template <int R, int P>
  TRTC_INLINE static void finish(I32x16 (&sums)[R][P], const Step<P>& s, const std::uint32_t* x, std::int64_t last,
                                 std::int64_t group) {
    // Copies: for all that a compiler knows, a total is stored over a field of the step.
    const float* x_scale = s.x_scale + group * R;
    float* totals = s.totals;
    F32x16 w_scale[P];
    I32x16 codes[n][P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      constexpr std::int64_t kBytes = kPanel * Of::kScaleBytes;
      w_scale[p] = scales_of(s.w_scale[p] + group * kBytes);
      fetch<kStreams<P>>(s.ahead_scale[p] + group * kBytes);
      Codes::fetch_ahead(s, p, last);
      const std::byte* block = s.w + p * s.panel_stride + last * Codes::kBytes;
      Codes::each_part([&]<int part>(std::integral_constant<int, part>) TRTC_INLINE_LAMBDA {
        codes[part][p] = Codes::template load_part<part>(s, block);
      });
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) {
        const Cell cell = broadcast_cell(x + j * R + r);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) Codes::dot(sums[r][p], codes[j][p], cell);
      }
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        float* total = totals + (r * P + p) * kPanel;
        const F32x16 scale = gemm::multiply(w_scale[p], splat(x_scale[r]));
        store(total, multiply_add(to_f32(sums[r][p]), scale, load(total)));
      }
    }
  }
};

// Whether a step of kStep panels of product Of reads quantised weights as they are stored.
#if defined(TRTC_AVX512) || defined(TRTC_AVX2)
template <class Of, int kStep>
constexpr bool kWidensInRegisters = (kWidens<Of> || Of::kPath == Path::dynamic) && Of::kExpands && kStreams<kStep>;
#else
template <class Of, int kStep>
constexpr bool kWidensInRegisters = false;
#endif

template <class Of, int kStep>
struct KernelOf {
  using type = FloatKernel<Of::kPath, Of::kGrouped, Of::kExpansion, Of::kStoredBytes>;
};
template <class Of, int kStep>
  requires(Of::kPath == Path::i8)
struct KernelOf<Of, kStep> {
  using type = ByteKernel;
};
template <class Of, int kStep>
  requires(Of::kPath == Path::dynamic)
struct KernelOf<Of, kStep> {
  static constexpr bool kIsExpanded = Of::kExpands && !kWidensInRegisters<Of, kStep>;
  using Expanded = Codes<Stored::small_bytes, Of::kStoredBytes / Of::kExpansion>;
  using type = DynamicKernel<Of, std::conditional_t<kIsExpanded, Expanded, Codes<kStoredAs<Of>>>>;
};
#if defined(TRTC_AVX512) || defined(TRTC_AVX2)
template <class Of, int kStep>
  requires(Of::kPath != Path::dynamic && kWidensInRegisters<Of, kStep>)
struct KernelOf<Of, kStep> {
  using type = WideningKernel<Of>;
};
#endif

// The kernel of product `Of` for tiles of `height` rows by kStep panels.
template <class Of, int kStep>
void (*kernel_for(int height))(const Step<kStep>&) {
  using Kernel = typename KernelOf<Of, kStep>::type;
  constexpr int kTallest = kStreams<kStep> ? kFewRows : Of::kMaxHeight;
  void (*found)(const Step<kStep>&) = nullptr;
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    const auto consider = [&]<int R>() {
      if constexpr (R <= kTallest) {
        if (R == height) found = &Kernel::template run<R, kStep>;
      }
    };
    (consider.template operator()<kHeights[i]>(), ...);
  }(std::make_index_sequence<std::size(kHeights)>{});
  return found;
}

}  // namespace trtc::gemm
