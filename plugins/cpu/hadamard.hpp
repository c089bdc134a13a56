// Products with Hadamard matrices of +-1, as plugins/hadamard.py has them, to the same bits.
#pragma once

#include <cstdint>
#include <utility>

#include "simd.hpp"
#include "vector.hpp"

namespace trtc {

namespace detail {

// x[i] + x[i + half] in lanes whose bit `half` is 0, x[i - half] - x[i] in the others.
template <int kHalf, int... I>
TRTC_INLINE Floats butterfly(Floats x, std::integer_sequence<int, I...>) {
  constexpr Floats signs = {((I & kHalf) ? -1.f : 1.f)...};
  return fma(x, signs, __builtin_shufflevector(x, x, (I ^ kHalf)...));  // products with 1 and -1 are exact
}

// The rounds of a block that stay inside of a vector.
template <int kHalf>
TRTC_INLINE Floats hadamard_of_lanes(Floats x) {
  if constexpr (kHalf == 0) {
    return x;
  } else {
    return hadamard_of_lanes<kHalf / 2>(butterfly<kHalf>(x, std::make_integer_sequence<int, kLanes>{}));
  }
}

// A block of whole vectors, which is in registers from load to store.
template <int kVectors>
TRTC_INLINE void hadamard_of_vectors(float* x) {
  Floats v[kVectors];
#pragma GCC unroll 64
  for (int i = 0; i < kVectors; ++i) v[i] = load(x + i * kLanes);
#pragma GCC unroll 8
  for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 64
    for (int i = 0; i < kVectors; ++i) {
      if (i & half) continue;
      const Floats one = v[i], other = v[i + half];
      v[i] = one + other;
      v[i + half] = one - other;
    }
  }
#pragma GCC unroll 64
  for (int i = 0; i < kVectors; ++i) store(x + i * kLanes, hadamard_of_lanes<kLanes / 2>(v[i]));
}

}  // namespace detail

// x[0..kCount) times the matrix of size kBlock, a power of two that divides kCount, block by block.
template <std::int64_t kCount, std::int64_t kBlock>
void hadamard(float* x) {
  static_assert(kBlock > 0 && (kBlock & (kBlock - 1)) == 0 && kCount % kBlock == 0, "blocks are whole");
  if constexpr (kBlock % kLanes == 0) {
    for (std::int64_t i = 0; i < kCount; i += kBlock) detail::hadamard_of_vectors<kBlock / kLanes>(x + i);
  } else {
    for (std::int64_t half = kBlock / 2; half > 0; half /= 2) {
      for (std::int64_t i = 0; i < kCount; ++i) {
        if (i & half) continue;
        const float one = x[i], other = x[i + half];
        x[i] = one + other;
        x[i + half] = one - other;
      }
    }
  }
}

}  // namespace trtc
