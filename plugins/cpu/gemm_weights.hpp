// Prepares weights for a kernel: gathers row-major rows into blocks, converts quantised types.
#pragma once

#include <bit>
#include <cstring>

#include "gemm_format.hpp"
#include "vector.hpp"
#include "gemm_six_bits.hpp"
#if defined(TRTC_AVX512)
#include "gemm_expand_avx512.hpp"
#elif defined(TRTC_AVX2)
#include "gemm_expand_avx2.hpp"
#endif

namespace trtc::gemm {

// The weights of one product. Scales and zero points are as stored: [columns, groups], or for packed
// weights, and those in planes, [groups, 16] panel after panel (plugins/layouts.py).
struct Weights {
  const std::byte* data;
  const float* scale;
  const std::uint8_t* zero;
  std::int64_t columns;
  std::int64_t depth;
  const std::uint8_t* scale_codes = nullptr;  // bytes, instead of scale
};

// Bytes of a row of a row-major [columns, depth] weight.
template <DType kWeight>
constexpr std::int64_t row_bytes(std::int64_t depth) {
  if (kWeight == DType::f32) return depth * 4;
  if (kWeight == DType::bf16) return depth * 2;
  return block_depth(kWeight) == 8 ? depth / 2 : depth;
}

// The cell of one row that starts at k, from row-major weights.
template <DType kWeight>
std::uint32_t gather_cell(const std::byte* row, std::int64_t k, std::int64_t depth) {
  std::uint32_t cell = 0;
  if constexpr (kWeight == DType::f32 || kWeight == DType::bf16) {
    const std::int64_t size = kWeight == DType::f32 ? 4 : 2;
    std::memcpy(&cell, row + k * size, depth - k < 4 / size ? 2 : 4);
  } else {
    constexpr bool kNibbles = block_depth(kWeight) == 8;
    for (int i = 0; i < block_depth(kWeight) && k + i < depth; ++i) {
      auto code = static_cast<std::uint32_t>(row[kNibbles ? (k + i) / 2 : k + i]);
      if (kNibbles) code = (code >> (4 * ((k + i) % 2))) & 15;
      if (kWeight == DType::i8) code ^= 0x80;
      if (kWeight == DType::i4) code ^= 8;
      cell |= code << cell_shift(i);
    }
  }
  return cell;
}

// Blocks [first, last) of a panel of row-major weights, as layouts.py packs them.
template <class P>
void gather_blocks(const Weights& w, std::int64_t panel, std::int64_t first, std::int64_t last, std::byte* out) {
  const std::int64_t stride = row_bytes<P::kWeight>(w.depth);
  for (std::int64_t block = first; block < last; ++block) {
    std::uint32_t cells[kPanel] = {};
    for (int c = 0; c < kPanel && panel * kPanel + c < w.columns; ++c) {
      const std::byte* row = w.data + (panel * kPanel + c) * stride;
      cells[c] = gather_cell<P::kWeight>(row, block * P::kBlockDepth, w.depth);
    }
    std::memcpy(out + (block - first) * kBlockBytes, cells, sizeof cells);
  }
}

#if defined(TRTC_AVX512) || defined(TRTC_AVX2)
// One block as the cells that kernels multiply, in registers.
template <class Of>
TRTC_INLINE void widen(const std::byte* from, const std::int32_t* zero, I32x16 (&out)[Of::kExpansion]) {
  if constexpr (Of::kCompact) return widen_compact(from, out);
  if constexpr (!Of::kCompact) widen_block<Of::kWeight, Of::kHasZero>(from, zero, out);
}
#endif

// One block of codes of iq4 or E2M1 as bytes, in cells of 4 of K.
template <DType kWeight>
TRTC_INLINE void unsigned_bytes(const std::byte* from, I32x16 (&out)[2]) {
  const I32x16 block = load_cells(from), mask = splat(0x0f0f0f0f);
  out[0] = look_up(bit_and(block, mask), kCodeBytes<kWeight>.data());
  out[1] = look_up(bit_and(shift_right<4>(block), mask), kCodeBytes<kWeight>.data());
}

// The same of codes of 6 bits.
template <DType>
TRTC_INLINE void unsigned_bytes(const std::byte* from, I32x16 (&out)[4]) {
  out[0] = six_bits<0>(from);
  out[1] = six_bits<1>(from);
  out[2] = six_bits<2>(from);
  out[3] = six_bits<3>(from);
}

// One block as floats: out[k][16]. zero: int32 of this panel's columns, when there are zero points.
template <DType kWeight, bool kHasZero>
void expand_f32(const std::byte* block, const std::int32_t* zero, float* out) {
  constexpr bool kNibbles = block_depth(kWeight) == 8;
  constexpr int kOffset = kWeight == DType::i8 ? 128 : kWeight == DType::i4 ? 8 : 0;
  typedef std::int32_t Integers __attribute__((vector_size(sizeof(Words))));
  for (int c = 0; c < kPanel; c += kLanes) {
    Words cells;
    std::memcpy(&cells, block + c * 4, sizeof cells);
    for (int k = 0; k < block_depth(kWeight); ++k) {
      Floats values;
      if constexpr (kWeight == DType::bf16) {
        values = as_floats(k == 0 ? cells << 16 : cells & 0xffff0000u);
      } else if constexpr (kWeight == DType::f8e4m3) {
        values = f8e4m3_values((cells >> cell_shift(k)) & 0xffu);
      } else if constexpr (kWeight == DType::f4e2m1) {
        for (int i = 0; i < kLanes; ++i) values[i] = kE2m1Values[(cells[i] >> cell_shift(k)) & 15u];
      } else if constexpr (kWeight == DType::iq4) {
        for (int i = 0; i < kLanes; ++i) values[i] = static_cast<float>(kIq4Values[(cells[i] >> cell_shift(k)) & 15u]);
      } else {
        Integers codes = (Integers)((cells >> cell_shift(k)) & (kNibbles ? 15u : 255u)) - kOffset;
        if constexpr (kHasZero) {
          Integers zeros;
          std::memcpy(&zeros, zero + c, sizeof zeros);
          codes -= zeros;
        }
        values = __builtin_convertvector(codes, Floats);
      }
      trtc::store(out + k * kPanel + c, values);
    }
  }
}

// One block of codes of 6 bits as floats: out[k][16].
inline void expand_six_f32(const std::byte* block, float* out) {
  const auto byte_at = [&](std::int64_t at) { return static_cast<int>(block[at]); };
  for (int k = 0; k < 16; ++k) {
    for (int c = 0; c < kPanel; ++c) {
      const int place = c * 4 + kByteOrder[k % 4];
      const int low = byte_at(k / 8 * kBlockBytes + place) >> (k % 8 / 4 * 4) & 15;
      const int high = byte_at(2 * kBlockBytes + place) >> (k / 4 * 2) & 3;
      out[k * kPanel + c] = static_cast<float>((high << 4 | low) - kSixOffset);
    }
  }
}

// One block of layout compact as floats: out[k][16].
inline void expand_compact_f32(const std::byte* block, float* out) {
  for (int k = 0; k < 8; ++k) {
    for (int c = 0; c < kPanel; ++c) {
      const int place = c / 4 * 16 + k % 4 / 2 * 8 + c % 4 * 2 + k % 2;
      const int nibble = static_cast<int>(block[2 * kBlockBytes + place]) >> (k / 4 * 4) & 15;
      const std::uint32_t low = static_cast<std::uint32_t>(block[k / 4 * kBlockBytes + place]);
      out[k * kPanel + c] = std::bit_cast<float>(low << 16 | std::uint32_t{kCompactHighBytes[nibble]} << 24);
    }
  }
}

// Widens blocks [first, last) of a panel, given from `in` on, to what the kernel multiplies.
// zero: [groups][16] int32, of this panel's columns.
template <class P>
void expand_blocks(const std::byte* in, std::int64_t first, std::int64_t last, std::int64_t group_blocks,
                   const std::int32_t* zero, std::byte* out) {
  for (std::int64_t block = first; block < last; ++block, in += P::kStoredBytes, out += P::kExpansion * kBlockBytes) {
    const std::int32_t* zeros = P::kHasZero ? zero + block / group_blocks * kPanel : nullptr;
    if constexpr (P::kPath == Path::dynamic) {
      I32x16 bytes[P::kExpansion];
      unsigned_bytes<P::kWeight>(in, bytes);
      for (int i = 0; i < P::kExpansion; ++i) store_cells(out + i * kBlockBytes, bytes[i]);
      continue;
    }
#if defined(TRTC_AVX512) || defined(TRTC_AVX2)
    if constexpr (kWidens<P>) {
      I32x16 wide[P::kExpansion];
      widen<P>(in, zeros, wide);
      for (int i = 0; i < P::kExpansion; ++i) store_cells(out + i * kBlockBytes, wide[i]);
      continue;
    }
#endif
    if constexpr (P::kCompact) {
      expand_compact_f32(in, reinterpret_cast<float*>(out));
      continue;
    }
    if constexpr (P::kWeight == DType::i6) {
      expand_six_f32(in, reinterpret_cast<float*>(out));
      continue;
    }
    expand_f32<P::kWeight, P::kHasZero>(in, zeros, reinterpret_cast<float*>(out));
  }
}

// Sixteen bytes that are scales, as floats in their unit.
template <Scales kScales>
TRTC_INLINE F32x16 widened_scales(const std::uint8_t* p) {
  static_assert(kScales != Scales::floats);
  if constexpr (kScales == Scales::iq4) return byte_scales(p);
  if constexpr (kScales == Scales::e8m0) return e8m0_scales(p);
  return e4m3_scales(p);
}

// The same of [groups][16].
template <Scales kScales>
void widen_byte_scales(const std::uint8_t* from, std::int64_t groups, float* to) {
  for (std::int64_t g = 0; g < groups; ++g) store(to + g * kPanel, widened_scales<kScales>(from + g * kPanel));
}

// Scales or zero points of one panel as [groups][16]; missing columns are zeros.
template <Layout kLayout, class From, class To>
void load_columns(const From* from, std::int64_t columns, std::int64_t groups, std::int64_t panel, To* to) {
  const std::int64_t first = panel * kPanel;
  const std::int64_t valid = columns - first < kPanel ? columns - first : kPanel;
  const std::int64_t of_column = kLayout == Layout::row_major ? groups : 1;
  const std::int64_t of_group = kLayout == Layout::row_major ? 1 : valid;
  from += first * groups;
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t c = 0; c < kPanel; ++c) {
      to[g * kPanel + c] = c < valid ? static_cast<To>(from[c * of_column + g * of_group]) : To{0};
    }
  }
}

}  // namespace trtc::gemm
