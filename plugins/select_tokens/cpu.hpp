// selected = slots of the top_k tokens by sum over heads of weight * relu(q . key), of those that a token sees.
//
// Keys are taken in blocks that are counted from position 0 of the sequence, each score a chain of
// multiply-adds: it depends on neither the step nor the threads.
#pragma once

#include <algorithm>

#include "cpu/context.hpp"
#include "cpu/paged_attention.hpp"

namespace trtc {

struct select_tokens_args {
  View q, weights, pool, query_start, context_lens, page_table, selected;
  std::int64_t M, B, P, num_pages;
};

namespace detail {

// Of the products of queries and keys, both widened to floats.
template <class C>
struct IndexKeys {
  static constexpr std::int64_t num_heads = C::num_heads, num_kv_heads = 1, head_dim = C::width, value_dim = C::width;
  static constexpr std::int64_t stored_width = C::width;
  using q_t = float;
  using pool_t = float;
};

// A token of the step that sees more than it may select.
struct SelectingRow {
  std::int32_t row, sequence, seen;
};

// A thread's memory.
template <class C>
struct SelectWorkspace {
  alignas(64) float queries[C::num_heads * C::width];
  alignas(64) float keys[C::width * attention::kPair];  // transposed: kPair keys a row
  alignas(64) float products[C::num_heads * attention::kBlock];
};

// Numbers in the order of scores: NaN is the smallest, and -0 is 0.
inline std::uint32_t score_order(float score) {
  if (score != score) return 0;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(score + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <class C>
class Selector {
 public:
  Selector(const select_tokens_args& a, const SelectingRow& row) : a_(a), row_(row) {}

  std::int64_t slot(std::int64_t position) const {
    const auto* pages = a_.page_table.row<const std::int32_t>(row_.sequence);
    return std::int64_t{pages[position / C::page_size]} * C::page_size + position % C::page_size;
  }

  // order[p] = score_order of the key at p, for p in [begin, end); begin is a multiple of kPair.
  void score(std::int64_t begin, std::int64_t end, SelectWorkspace<C>& work, std::uint32_t* order) const {
    const auto* q = a_.q.row<const typename C::q_t>(row_.row);
    for_vectors(C::num_heads * C::width, [&](std::int64_t i, auto n) { store(work.queries + i, load(q + i, n), n); });
    for (; begin < end; begin += attention::kPair) {
      const std::int64_t count = attention::smaller(attention::kPair, end - begin);
      load_keys(begin, count, work);
      alignas(64) float scores[attention::kPair];
      multiply(work, scores);
      for (std::int64_t i = 0; i < count; ++i) order[begin + i] = score_order(scores[i]);
    }
  }

  // Writes the slots of the largest of order[0..seen); `copy` has room for as many.
  void select(const std::uint32_t* order, std::uint32_t* copy) const {
    std::copy(order, order + row_.seen, copy);
    std::nth_element(copy, copy + C::top_k - 1, copy + row_.seen, std::greater<>());
    const std::uint32_t least = copy[C::top_k - 1];
    std::int64_t equal = C::top_k - std::count_if(order, order + row_.seen, [&](std::uint32_t one) { return one > least; });
    auto* to = a_.selected.row<std::int32_t>(row_.row);
    for (std::int64_t position = 0; position < row_.seen; ++position) {
      if (order[position] > least || (order[position] == least && equal-- > 0)) {
        *to++ = static_cast<std::int32_t>(slot(position));
      }
    }
  }

 private:
  void load_keys(std::int64_t begin, std::int64_t count, SelectWorkspace<C>& work) const {
    const auto* pool = static_cast<const typename C::pool_t*>(a_.pool.data);
    if (count < attention::kPair) std::memset(work.keys, 0, sizeof work.keys);
    for (std::int64_t key = 0; key < count; ++key) {
      float widened[C::width];
      const auto* from = pool + slot(begin + key) * C::width;
      for_vectors(C::width, [&](std::int64_t i, auto n) { store(widened + i, load(from + i, n), n); });
      for (std::int64_t i = 0; i < C::width; ++i) work.keys[i * attention::kPair + key] = widened[i];
    }
  }

  void multiply(SelectWorkspace<C>& work, float* scores) const {
    const auto words = [](const float* of) { return reinterpret_cast<const std::uint32_t*>(of); };
    attention::for_rows<attention::kRowsAtOnce>(0, C::num_heads, [&]<int n>(std::int64_t head) {
      attention::multiply_keys<IndexKeys<C>, n>(words(work.queries + head * C::width), words(work.keys),
                                                work.products + head * attention::kBlock);
    });
    const auto* weights = a_.weights.row<const float>(row_.row);
    for (std::int64_t i = 0; i < attention::kPair; i += kLanes) {
      Floats total{};
      for (std::int64_t head = 0; head < C::num_heads; ++head) {
        const Floats product = load(work.products + head * attention::kBlock + i);
        total = fma(product < 0.f ? Floats{} : product, broadcast(weights[head]), total);  // NaN stays
      }
      store(scores + i, total);
    }
  }

  const select_tokens_args& a_;
  const SelectingRow& row_;
};

// What the kernel needs beside its tensors.
template <class C>
struct SelectScratch {
  SelectScratch(std::byte* area, std::int64_t max_rows, int num_threads) : carver(area) {
    work = carver.take<SelectWorkspace<C>>(num_threads);
    order = carver.take<std::uint32_t>(kContext * num_threads);
    copy = carver.take<std::uint32_t>(kContext * num_threads);
    rows = carver.take<SelectingRow>(max_rows);
  }

  static constexpr std::int64_t kContext = attention::round_up(C::max_context, 16);
  Carver carver;
  SelectWorkspace<C>* work;
  std::uint32_t* order;  // of each thread
  std::uint32_t* copy;
  SelectingRow* rows;
};

// Rows that see no more than they may select get all of it; the others are listed.
template <class C>
std::int64_t list_rows(const select_tokens_args& a, SelectingRow* rows) {
  const auto* start = static_cast<const std::int32_t*>(a.query_start.data);
  const auto* contexts = static_cast<const std::int32_t*>(a.context_lens.data);
  std::int64_t count = 0;
  for (std::int32_t b = 0; b < a.B; ++b) {
    for (std::int32_t row = start[b]; row < start[b + 1]; ++row) {
      const SelectingRow one{row, b, contexts[b] - (start[b + 1] - row) + 1};
      if (one.seen > C::top_k) {
        rows[count++] = one;
        continue;
      }
      const Selector<C> selector(a, one);
      auto* to = a.selected.row<std::int32_t>(row);
      for (std::int64_t i = 0; i < one.seen; ++i) to[i] = static_cast<std::int32_t>(selector.slot(i));
      std::fill(to + one.seen, to + C::top_k, -1);
    }
  }
  return count;
}

}  // namespace detail

template <class C>
std::size_t select_tokens_scratch(std::int64_t max_rows, int num_threads) {
  return detail::SelectScratch<C>(nullptr, max_rows, num_threads).carver.bytes();
}

template <class C>
void select_tokens(Context& ctx, const select_tokens_args& a) {
  static_assert(C::planes == 1 && C::index_keys == 1);
  const int threads = ctx.threads.size();
  detail::SelectScratch<C> scratch(ctx.scratch, a.M, threads);
  const std::int64_t count = detail::list_rows<C>(a, scratch.rows);
  if (count >= threads) {
    ctx.threads.for_each(count, [&](std::int64_t item, int thread) {
      const detail::Selector<C> selector(a, scratch.rows[item]);
      std::uint32_t* order = scratch.order + thread * scratch.kContext;
      selector.score(0, scratch.rows[item].seen, scratch.work[thread], order);
      selector.select(order, scratch.copy + thread * scratch.kContext);
    });
    return;
  }
  // Fewer rows than threads: the threads share the keys of each.
  for (std::int64_t item = 0; item < count; ++item) {
    const detail::Selector<C> selector(a, scratch.rows[item]);
    const std::int64_t seen = scratch.rows[item].seen;
    ctx.threads.for_each((seen + attention::kSpan - 1) / attention::kSpan, [&](std::int64_t span, int thread) {
      const std::int64_t begin = span * attention::kSpan, end = attention::smaller(begin + attention::kSpan, seen);
      selector.score(begin, end, scratch.work[thread], scratch.order);
    });
    selector.select(scratch.order, scratch.copy);
  }
}

}  // namespace trtc
