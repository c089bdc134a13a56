// The rows of each sequence, one after the other, through a recurrence whose state is kept in pages.
//
// A state is read where it was left and written where the row leaves it: rows of one page do so in
// place, and what a row before a page's border left stays. Rows come one after the other, so that
// no bit depends on how a prompt was cut.
#pragma once

#include <cstdint>

#include "cpu/context.hpp"

namespace trtc {

// Parts of a state that do not depend on each other: heads, or some channels.
//
// a: the operator's arguments, with query_start, context_lens, page_table and slots.
// work: of a row and a part, as of rows_a_part.
// part_of: a part's number -> an object with state_in(page), clear(state) and row(number, from, to), which
//          makes the state `to` of `from`; they may be one.
template <class C, class Arguments, class PartOf>
void recur(Context& ctx, const Arguments& a, std::int64_t parts, std::int64_t work, PartOf&& part_of) {
  const auto* query_start = static_cast<const std::int32_t*>(a.query_start.data);
  const auto* context_lens = static_cast<const std::int32_t*>(a.context_lens.data);
  const auto* slots = static_cast<const std::int32_t*>(a.slots.data);
  const std::int64_t grain = rows_a_part(work * ((a.M + a.B - 1) / a.B));
  ctx.threads.parallel_for(a.B * parts, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t sequence = i / parts;
      const std::int64_t rows_begin = query_start[sequence], rows_end = query_start[sequence + 1];
      const auto* pages = a.page_table.template row<const std::int32_t>(sequence);
      const std::int64_t start = context_lens[sequence] - (rows_end - rows_begin);
      auto part = part_of(i % parts);
      const float* from = start > 0 ? part.state_in(pages[(start - 1) / C::page_size]) : nullptr;
      for (std::int64_t row = rows_begin; row < rows_end; ++row) {
        float* to = part.state_in(slots[row] / static_cast<std::int32_t>(C::page_size));
        if (from == nullptr) {
          part.clear(to);
          from = to;
        }
        part.row(row, from, to);
        from = to;
      }
    }
  });
}

}  // namespace trtc
