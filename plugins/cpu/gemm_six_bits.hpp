// Packed codes of 6 bits as bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm_format.hpp"

namespace trtc::gemm {

static_assert(2 * 63 * 127 < 1 << 15, "pairs of products with int8 have room in words");

// Cells [4 part, 4 part + 4) of K of a block (plugins/layouts.py), unsigned, kSixOffset more than the
// weights.
template <int part>
TRTC_INLINE I32x16 six_bits(const std::byte* block) {
  const I32x16 nibbles = load_cells(block + part / 2 * kBlockBytes), pairs = load_cells(block + 2 * kBlockBytes);
  const I32x16 low = bit_and(part % 2 == 0 ? nibbles : shift_right<4>(nibbles), splat(0x0f0f0f0f));
  const auto moved = [&]() TRTC_INLINE_LAMBDA {
    if constexpr (part < 2) return shift_left<4 - 2 * part>(pairs);
    if constexpr (part == 2) return pairs;
    if constexpr (part == 3) return shift_right<2>(pairs);
  };
  return select_bits(splat(0x30303030), moved(), low);
}

}  // namespace trtc::gemm
