// A head's norm and rotary embedding, for operators whose axes have head_dim, rotary_half and eps.
#pragma once

#include <cmath>
#include <cstring>

#include "types.hpp"
#include "vector.hpp"

namespace trtc::detail {

// out[0..head_dim) = the head x, normalised when there is a norm: both rounded to x's type.
template <class C, class Norm, class T>
void normed_head(T* out, const T* x, const float* weight) {
  if constexpr (std::is_same_v<Norm, none>) {
    std::memcpy(out, x, sizeof(T) * C::head_dim);
  } else {
    Floats squares{};
    for_vectors(C::head_dim, [&](std::int64_t i, auto n) {
      const Floats value = load(x + i, n);
      squares = fma(value, value, squares);
    });
    const float rms = std::sqrt(sum(squares) / static_cast<float>(C::head_dim) + C::eps);
    for_vectors(C::head_dim,
                [&](std::int64_t i, auto n) { store(out + i, load(x + i, n) / rms * load(weight + i, n), n); });
  }
}

// Rotates pairs (i, i + rotary_half) of a head in place.
template <class C, class T>
void rotate_head(T* head, const float* cos, const float* sin) {
  T* second_half = head + C::rotary_half;
  for_vectors(C::rotary_half, [&](std::int64_t i, auto n) {
    const Floats c = load(cos + i, n), s = load(sin + i, n);
    const Floats first = load(head + i, n), second = load(second_half + i, n);
    store(head + i, first * c - second * s, n);
    store(second_half + i, second * c + first * s, n);
  });
}

// out[0..head_dim) = the head x, normalised before or after it is rotated.
template <class C, class Norm, class T>
void normed_and_rotated(T* out, const T* x, const float* weight, const float* cos, const float* sin) {
  if constexpr (C::norm_after != 0) {
    T rotated[C::head_dim];
    std::memcpy(rotated, x, sizeof rotated);
    rotate_head<C>(rotated, cos, sin);
    normed_head<C, Norm>(out, rotated, weight);
  } else {
    normed_head<C, Norm>(out, x, weight);
    rotate_head<C>(out, cos, sin);
  }
}

}  // namespace trtc::detail
