// Where things are in a paged KV pool [num_pages, planes, page_size, num_kv_heads, head_dim].
#pragma once

#include <cstdint>

#include "vector.hpp"

namespace trtc {

enum class Half : std::int64_t { keys = 0, values = 1 };

// The num_kv_heads * head_dim elements of one token.
template <class C, class Pool>
Pool* token_in_pool(Pool* pool, Half half, std::int64_t page, std::int64_t offset) {
  constexpr std::int64_t token = C::num_kv_heads * C::head_dim;
  return pool + ((page * C::planes + static_cast<std::int64_t>(half)) * C::page_size + offset) * token;
}

template <class C, class Pool>
Pool* slot_in_pool(Pool* pool, Half half, std::int64_t slot) {
  return token_in_pool<C>(pool, half, slot / C::page_size, slot % C::page_size);
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

}  // namespace trtc
