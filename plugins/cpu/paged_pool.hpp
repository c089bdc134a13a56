// Where things are in a paged KV pool [num_pages, planes, page_size, num_kv_heads, head_dim + scale_bytes].
//
// A plane of a page has [page_size, num_kv_heads, head_dim] elements, and with scale_bytes an f32 for each
// of its heads, [page_size, num_kv_heads], behind them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "quantizer.hpp"

namespace trtc {

enum class Half : std::int64_t { keys = 0, values = 1 };

template <class C, class Pool>
Pool* plane_in_pool(Pool* pool, Half half, std::int64_t page) {
  constexpr std::int64_t plane = C::page_size * C::num_kv_heads * (C::head_dim + C::scale_bytes);
  return pool + (page * C::planes + static_cast<std::int64_t>(half)) * plane;
}

// The num_kv_heads * head_dim elements of one token.
template <class C, class Pool>
Pool* token_in_pool(Pool* pool, Half half, std::int64_t page, std::int64_t offset) {
  return plane_in_pool<C>(pool, half, page) + offset * (C::num_kv_heads * C::head_dim);
}

// Its num_kv_heads scales.
template <class C, class Pool>
auto* scales_in_pool(Pool* pool, Half half, std::int64_t page, std::int64_t offset) {
  static_assert(C::scale_bytes == sizeof(float) && sizeof(Pool) == 1 && C::head_dim % alignof(float) == 0);
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
  Pool* const to = token_in_pool<C>(pool, half, page, offset) + head * C::head_dim;
  if constexpr (C::scale_bytes > 0) {
    static_assert(std::is_same_v<Scale, none>, "a head has a scale of its own");
    scales_in_pool<C>(pool, half, page, offset)[head] = quantize_head(values, C::head_dim, to);
  } else {
    write_to_pool<Scale>(to, values, C::head_dim, scale);
  }
}

}  // namespace trtc
