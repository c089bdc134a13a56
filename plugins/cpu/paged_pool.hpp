// Where things are in a paged KV pool [num_pages, planes, page_size, num_kv_heads, stored_width].
//
// A plane of a page has [page_size, num_kv_heads, code_width] elements, and where stored_width is more an f32
// for each of its heads, [page_size, num_kv_heads], behind them. A pool of bytes has codes of 4 bits, two a
// byte, the first in the low half: n stands for (n - 8) * scale. plugins/four_bits.py has more.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hadamard.hpp"
#include "quantizer.hpp"

namespace trtc {

enum class Half : std::int64_t { keys = 0, values = 1 };

template <class Pool>
inline constexpr bool kPacked = std::is_same_v<std::remove_const_t<Pool>, std::uint8_t>;
// Elements of a pool that so many numbers of a head take.
template <class Pool>
constexpr std::int64_t code_width(std::int64_t numbers) {
  return kPacked<Pool> ? numbers / 2 : numbers;
}
template <class C>
inline constexpr bool kScaled = C::stored_width > code_width<typename C::pool_t>(C::head_dim);

template <class C, class Pool>
Pool* plane_in_pool(Pool* pool, Half half, std::int64_t page) {
  constexpr std::int64_t plane = C::page_size * C::num_kv_heads * C::stored_width;
  return pool + (page * C::planes + static_cast<std::int64_t>(half)) * plane;
}

// The num_kv_heads * code_width elements of one token.
template <class C, class Pool>
Pool* token_in_pool(Pool* pool, Half half, std::int64_t page, std::int64_t offset) {
  return plane_in_pool<C>(pool, half, page) + offset * (C::num_kv_heads * code_width<Pool>(C::head_dim));
}

// Its num_kv_heads scales.
template <class C, class Pool>
auto* scales_in_pool(Pool* pool, Half half, std::int64_t page, std::int64_t offset) {
  constexpr std::int64_t width = code_width<Pool>(C::head_dim);
  static_assert(C::stored_width == width + sizeof(float) && sizeof(Pool) == 1 && width % alignof(float) == 0);
  using Scale = std::conditional_t<std::is_const_v<Pool>, const float, float>;
  Pool* const behind = token_in_pool<C>(pool, half, page, C::page_size);
  return reinterpret_cast<Scale*>(behind) + offset * C::num_kv_heads;
}

// values to int8 by their largest magnitude; returns the worth of one unit, NaN if one is not finite.
template <class Value>
float quantize_head(const Value* values, std::int64_t count, std::int8_t* codes) {
  Floats lanes{}, strange{};
  for_vectors(count, [&](std::int64_t i, auto n) {
    const Floats x = load(values + i, n);
    lanes = max(lanes, as_floats(bits_of(x) & 0x7fffffffu));
    strange = strange + x * 0.f;
  });
  const float amax = largest(lanes);
  const float scale = (amax > kLeastMagnitude ? amax : kLeastMagnitude) / kLargestCode<std::int8_t>;
  for_vectors(count, [&](std::int64_t i, auto n) { store(codes + i, load(values + i, n) / scale, n); });
  return scale + sum(strange);
}

// The heads' 4-bit codes of two vectors, the even and the odd elements of values, in the low byte of each word.
inline Words packed_codes(Floats even, Floats odd) {
  const auto code = [](Floats x) {
    x = x > -8.f ? x : broadcast(-8.f);  // NaN too
    x = x < 7.f ? x : broadcast(7.f);
    return (bits_of(x + 0x1.8p23f) + 8u) & 15u;  // the unit of a float near 1.5 * 2^23 is 1
  };
  return code(even) | code(odd) << 4;
}

// Channels that a Hadamard matrix turns together: plugins/four_bits.py's `hadamard_block`.
template <std::int64_t kHeadDim>
inline constexpr std::int64_t kHadamardBlock = kHeadDim & -kHeadDim;

// values to codes of 4 bits by the one of largest magnitude, which becomes -8; returns the worth of one unit,
// NaN if one is not finite. Keys are multiplied by a Hadamard matrix first.
template <std::int64_t kCount, class Value>
float pack_head(Half half, const Value* values, std::uint8_t* codes) {
  alignas(64) float x[(kCount + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes)] = {};
  Floats strange{};
  for_vectors(kCount, [&](std::int64_t i, auto n) {
    const Floats value = load(values + i, n);
    store(x + i, value, n);
    strange = strange + value * 0.f;
  });
  if (half == Half::keys) hadamard<kCount, kHadamardBlock<kCount>>(x);
  float highest = x[0], lowest = x[0];
  for (std::int64_t i = 1; i < kCount; ++i) {
    highest = x[i] > highest ? x[i] : highest;
    lowest = x[i] < lowest ? x[i] : lowest;
  }
  float most = highest >= -lowest ? highest : lowest;
  if (!(std::fabs(most) >= kLeastMagnitude)) most = kLeastMagnitude;
  const float scale = most / -8.f;
  for (std::int64_t i = 0; i < kCount / 2; i += kLanes) {
    Floats even, odd;
    for (int lane = 0; lane < kLanes; ++lane) {
      even[lane] = x[2 * (i + lane)];
      odd[lane] = x[2 * (i + lane) + 1];
    }
    const auto bytes = low_bytes(packed_codes(even / scale, odd / scale));
    const std::int64_t left = kCount / 2 - i;
    std::memcpy(codes + i, &bytes, left < kLanes ? left : kLanes);
  }
  return scale + sum(strange);
}

// pool[0..count) = values / scale; Scale is `none` where there is no scale.
template <class Scale, class Value, class Pool>
void write_to_pool(Pool* pool, const Value* values, std::int64_t count, float scale) {
  for_vectors(count, [&](std::int64_t i, auto n) {
    Floats x = load(values + i, n);
    if constexpr (!std::is_same_v<Scale, none>) x = x / scale;
    store(pool + i, x, n);
  });
}

// One head of one token; Scale is `none` where the checkpoint has no scale.
template <class C, class Scale, class Value, class Pool>
void write_head(Pool* pool, Half half, std::int64_t slot, std::int64_t head, const Value* values, float scale) {
  const std::int64_t page = slot / C::page_size, offset = slot % C::page_size;
  Pool* const to = token_in_pool<C>(pool, half, page, offset) + head * code_width<Pool>(C::head_dim);
  if constexpr (kScaled<C>) {
    static_assert(std::is_same_v<Scale, none>, "a head has a scale of its own");
    float& own = scales_in_pool<C>(pool, half, page, offset)[head];
    if constexpr (kPacked<Pool>) {
      own = pack_head<C::head_dim>(half, values, to);
    } else {
      own = quantize_head(values, C::head_dim, to);
    }
  } else {
    write_to_pool<Scale>(to, values, C::head_dim, scale);
  }
}

}  // namespace trtc
