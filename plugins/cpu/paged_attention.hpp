// Attention over each sequence's pages, for the operators that attend:
// out = quantize(softmax(q . K * scale) . V), causal.
//
// C has what an operator's configuration has, value_dim: of a value, and end: tokens at this position of a
// sequence and behind it are left out; 0: none are. A pool of one plane has the values in its keys: they
// are the first value_dim elements of them.
//
// A head's sink is one more score of its softmax, without a value: what the sums of a row begin with.
//
// The work is cut into tiles: some tokens of one sequence times the query heads that share one KV
// head, or one token times several KV heads. A tile's rows (KV head by KV head, token by token) go
// through the keys together, so K and V are read once a tile; those of several heads lie side by side
// in the pool, which memory is several times faster at than at one head of every key.
//
// What is computed for a row does not depend on the tile it is in, nor on the step: keys are taken
// in blocks of kBlock and spans of kSpan that are counted from position 0 of the sequence; within
// a span the softmax runs online, block by block; the spans' results are merged in order. Keys that
// a row does not see are never multiplied, not even by zero: they may be NaN.
#pragma once

#include "context.hpp"
#include "paged_pool.hpp"
#include "quantizer.hpp"
#include "simd.hpp"

namespace trtc {

namespace attention {

// What attention reads and writes.
struct Tensors {
  View q, pool, query_start, context_lens, page_table, k_scale, v_scale, pre_scale, out_scale, sinks, out;
  std::int64_t M, B, P, num_pages;
};

inline constexpr std::int64_t kBlock = 64;  // keys between two updates of the running maximum
inline constexpr std::int64_t kSpan = 512;  // keys that one thread takes when a context is split
inline constexpr std::int64_t kPair = 2 * kLanes;

inline constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// Sizes that follow from the configuration.
template <class C>
struct Sizes {
  static constexpr std::int64_t group = C::num_heads / C::num_kv_heads;
  static constexpr std::int64_t tokens = group >= 64 ? 1 : 64 / group;  // of a tile
  static constexpr std::int64_t rows = tokens * group;
  static constexpr std::int64_t columns = round_up(C::value_dim, kPair);  // of V and the sums
  static_assert(C::num_heads % C::num_kv_heads == 0 && C::head_dim % 8 == 0 && kBlock % kPair == 0);

  // Whether queries and keys are multiplied as pairs of bf16, which both are exactly.
#ifdef TRTC_AVX512
  static constexpr bool dots = std::is_same_v<typename C::q_t, bf16> && !std::is_same_v<typename C::pool_t, float>;
#else
  static constexpr bool dots = false;
#endif
  // Whether each key and value has a scale of its own, and whether two of their elements share a byte. The
  // latter are widened by twos, so `columns` of V and the sums have the even ones of kPair first there.
  static constexpr bool scaled = kScaled<C>;
  static constexpr bool packed = kPacked<typename C::pool_t>;
  // Elements of the pool that a head takes.
  static constexpr std::int64_t codes = code_width<typename C::pool_t>(C::head_dim);
  static constexpr std::int64_t words = dots ? C::head_dim / 2 : C::head_dim;  // of a query or key
};

// Positions [begin, end).
struct Range {
  std::int64_t begin, end;

  bool empty() const { return begin >= end; }
  Range within(Range other) const { return {larger(begin, other.begin), smaller(end, other.end)}; }
};

// Tokens [first, first + count) of the step: consecutive ones of one sequence, for KV heads
// [kv_head, kv_head + heads). Either is one.
struct Tile {
  std::int64_t sequence, kv_head, heads, first, count, position;  // position: of the first token

  template <class C>
  Range seen(std::int64_t token) const {
    const std::int64_t end = position + token + 1;
    if constexpr (C::chunked != 0) return {(end - 1) / C::window * C::window, end};
    return {C::window == 0 ? 0 : larger(0, end - C::window), end};
  }
  template <class C>
  Range seen() const {
    return {seen<C>(0).begin, seen<C>(count - 1).end};
  }
};

// Softmax over some keys, unfinished: each row's largest score, sum of exponentials and weighted
// sum of V, the latter two relative to the largest score.
template <class C>
struct Partial {
  float largest[Sizes<C>::rows];
  float total[Sizes<C>::rows];
  alignas(64) float sums[Sizes<C>::rows * Sizes<C>::columns];

  void clear(std::int64_t rows) {
    for (std::int64_t i = 0; i < rows; ++i) largest[i] = -std::numeric_limits<float>::infinity();
    for (std::int64_t i = 0; i < rows; ++i) total[i] = 0.f;
    std::memset(sums, 0, sizeof(float) * rows * Sizes<C>::columns);
  }

  float* row(std::int64_t i) { return sums + i * Sizes<C>::columns; }
  const float* row(std::int64_t i) const { return sums + i * Sizes<C>::columns; }

  // Adds the softmax of later keys to row i.
  void merge_row(std::int64_t i, const Partial& later) {
    const Floats new_largest = broadcast(larger_score(largest[i], later.largest[i]));
    const Floats mine = exp(broadcast(largest[i]) - new_largest);
    const Floats theirs = exp(broadcast(later.largest[i]) - new_largest);
    largest[i] = new_largest[0];
    total[i] = total[i] * mine[0] + later.total[i] * theirs[0];
    for (std::int64_t d = 0; d < Sizes<C>::columns; d += kLanes) {
      store(row(i) + d, fma(load(row(i) + d), mine, load(later.row(i) + d) * theirs));
    }
  }

  // A NaN wins, so that it is not lost.
  static float larger_score(float a, float b) { return a > b || a != a ? a : b; }
};

// Which tile is number `item` of the step; tiles are counted sequence by sequence, and within one
// the KV heads change fastest. Calls with ascending items continue from the last one.
template <class C>
class Tiles {
 public:
  // heads: KV heads of a tile of one token.
  explicit Tiles(const Tensors& a, std::int64_t heads = 1) : a_(&a), heads_(heads) {}

  // Tiles of single tokens as wide as leaves every thread two.
  static Tiles for_threads(const Tensors& a, int num_threads) {
    const std::int64_t most = smaller(C::num_kv_heads, Sizes<C>::tokens);
    const std::int64_t wanted = smaller(most, larger(1, Tiles(a).count() / (2 * num_threads)));
    const std::int64_t parts = round_up(C::num_kv_heads, wanted) / wanted;
    return Tiles(a, round_up(C::num_kv_heads, parts) / parts);
  }

  std::int64_t count() const {
    std::int64_t total = 0;
    for (std::int64_t b = 0; b < a_->B; ++b) total += tiles_of(b);
    return total;
  }

  Tile operator[](std::int64_t item) {
    if (item < before_) sequence_ = before_ = 0;
    while (item >= before_ + tiles_of(sequence_)) before_ += tiles_of(sequence_++);
    const std::int64_t heads = heads_of(sequence_), parts = parts_of(sequence_);
    const std::int64_t tile = (item - before_) / parts, kv_head = (item - before_) % parts * heads;
    const std::int64_t skipped = tile * Sizes<C>::tokens;
    return {sequence_, kv_head, smaller(heads, C::num_kv_heads - kv_head), start(sequence_) + skipped,
            smaller(Sizes<C>::tokens, tokens_of(sequence_) - skipped), position_of(sequence_) + skipped};
  }

 private:
  std::int64_t start(std::int64_t b) const { return static_cast<const std::int32_t*>(a_->query_start.data)[b]; }
  // Position of a sequence's first new token.
  std::int64_t position_of(std::int64_t b) const {
    return static_cast<const std::int32_t*>(a_->context_lens.data)[b] - (start(b + 1) - start(b));
  }
  std::int64_t tokens_of(std::int64_t b) const {
    const std::int64_t every = start(b + 1) - start(b);
    return C::end == 0 ? every : smaller(every, larger(0, C::end - position_of(b)));
  }
  std::int64_t heads_of(std::int64_t b) const { return tokens_of(b) == 1 ? heads_ : 1; }
  std::int64_t parts_of(std::int64_t b) const { return (C::num_kv_heads + heads_of(b) - 1) / heads_of(b); }
  std::int64_t tiles_of(std::int64_t b) const {
    return (tokens_of(b) + Sizes<C>::tokens - 1) / Sizes<C>::tokens * parts_of(b);
  }

  const Tensors* a_;
  std::int64_t heads_;
  std::int64_t sequence_ = 0, before_ = 0;
};

// Where the keys and values of a block's tokens are in the pool, at the tile's first KV head; keys
// that no token sees are at a row of zeros.
template <class C>
struct BlockRows {
  const typename C::pool_t* keys[kBlock];
  const typename C::pool_t* values[kBlock];
  const float* key_scales[Sizes<C>::scaled ? kBlock : 1];
  const float* value_scales[Sizes<C>::scaled ? kBlock : 1];
};

// A thread's memory.
template <class C>
struct Workspace {
  alignas(64) Tiles<C> tiles;
  alignas(64) std::uint32_t queries[Sizes<C>::rows * Sizes<C>::words];  // floats, or pairs of bf16
  alignas(64) std::uint32_t keys[Sizes<C>::words * kPair];              // transposed: kPair keys a row
  alignas(64) float values[kBlock * Sizes<C>::columns];                 // padded with zeros
  alignas(64) float scores[Sizes<C>::rows * kBlock];
  BlockRows<C> rows[2];  // of the block at hand and of the next
  alignas(64) float key_scales[kBlock];  // of the KV head and block at hand; 0 of keys that no token sees
  alignas(64) float value_scales[kBlock];
  alignas(64) Partial<C> span;
  alignas(64) Partial<C> whole;
};

// ---- the two products --------------------------------------------------------------------------

inline Words load_words(const std::uint32_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// sum + q * k, for one float of each, or a pair of bf16.
template <bool kDots>
Floats multiply_word(Floats sum, const std::uint32_t* q, Words k) {
#ifdef TRTC_AVX512
  if constexpr (kDots) {
    gemm::F32x16 total{(__m512)sum};
    gemm::dot_bf16(total, {(__m512i)k}, gemm::broadcast_cell(q));
    return (Floats)total.v;
  }
#endif
  return fma(broadcast(std::bit_cast<float>(*q)), as_floats(k), sum);
}

// scores[r][0..kPair) = queries[r] . keys, each a chain of multiply-adds over head_dim.
template <class C, int kRows>
void multiply_keys(const std::uint32_t* queries, const std::uint32_t* keys, float* scores) {
  constexpr bool kDots = Sizes<C>::dots;
  Floats low[kRows] = {}, high[kRows] = {};
  for (std::int64_t d = 0; d < Sizes<C>::words; ++d) {
    const Words k_low = load_words(keys + d * kPair), k_high = load_words(keys + d * kPair + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const std::uint32_t* q = queries + r * Sizes<C>::words + d;
      low[r] = multiply_word<kDots>(low[r], q, k_low);
      high[r] = multiply_word<kDots>(high[r], q, k_high);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store(scores + r * kBlock, low[r]);
    store(scores + r * kBlock + kLanes, high[r]);
  }
}

// The values of kPair columns.
inline Pair load_pair(const std::uint8_t* from) { return load_packed(from); }
template <class T>
Pair load_pair(const T* from) {
  return {load(from), load(from + kLanes)};
}

// sums[r] += sum over keys of weights[r][key] * value_of(key, column), each a chain of multiply-adds.
template <class C, int kRows, class ValueOf>
void multiply_values(const float* weights, ValueOf&& value_of, Range keys, float* sums) {
  constexpr std::int64_t columns = Sizes<C>::columns;
  for (std::int64_t d = 0; d < columns; d += kPair) {
    Floats low[kRows], high[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      low[r] = load(sums + r * columns + d);
      high[r] = load(sums + r * columns + d + kLanes);
    }
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
      const auto [v_low, v_high] = load_pair(value_of(key, d));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Floats w = broadcast(weights[r * kBlock + key]);
        low[r] = fma(w, v_low, low[r]);
        high[r] = fma(w, v_high, high[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      store(sums + r * columns + d, low[r]);
      store(sums + r * columns + d + kLanes, high[r]);
    }
  }
}

// Calls f.template operator()<n>(row) for rows [begin, end), at most kMost at a time.
template <int kMost, class F>
void for_rows(std::int64_t begin, std::int64_t end, F&& f) {
  for (; begin + kMost <= end; begin += kMost) f.template operator()<kMost>(begin);
  if constexpr (kMost > 1) {
    if (begin < end) for_rows<kMost - 1>(begin, end, f);
  }
}

inline constexpr int kRowsAtOnce = 6;  // twelve sums in registers
inline constexpr std::int64_t kFewRows = 2 * kRowsAtOnce;  // so few that widened V is not worth keeping

// ---- one tile ----------------------------------------------------------------------------------

template <class C>
class TileRunner {
 public:
  using Pool = typename C::pool_t;
  using S = Sizes<C>;

  TileRunner(const Tensors& a, const Tile& tile, Workspace<C>& work)
      : a_(a),
        tile_(tile),
        work_(work),
        pages_(a.page_table.row<const std::int32_t>(tile.sequence)),
        pool_(static_cast<const Pool*>(a.pool.data) + tile.kv_head * S::codes) {}

  std::int64_t rows() const { return tile_.heads * rows_of_head(); }

  void load_queries() {
    for (std::int64_t row = 0; row < rows(); ++row) {
      const auto* q = a_.q.row<const typename C::q_t>(token_of(row)) + head_of(row) * C::head_dim;
      std::uint32_t* to = work_.queries + row * S::words;
      if constexpr (S::packed) {
        load_turned(q, to);
      } else if constexpr (!S::dots) {
        for_vectors(C::head_dim, [&](std::int64_t i, auto n) { store(reinterpret_cast<float*>(to) + i, load(q + i, n), n); });
      } else if constexpr (std::is_same_v<Pool, bf16>) {
        std::memcpy(to, q, sizeof(bf16) * C::head_dim);
      } else {
        // A word of four bytes widens to elements 0 and 2, then 1 and 3.
        for (std::int64_t i = 0; i < S::words; ++i) {
          const bf16* pair = q + i / 2 * 4 + i % 2;
          to[i] = pair[0].bits | std::uint32_t{pair[2].bits} << 16;
        }
      }
    }
  }

  // One query as plugins/kv_pool.py's `queries` makes it, in the order of store_key_words.
  static void load_turned(const typename C::q_t* q, std::uint32_t* to) {
    alignas(64) float turned[C::head_dim];
    for_vectors(C::head_dim, [&](std::int64_t i, auto n) { store(turned + i, load(q + i, n), n); });
    hadamard<C::head_dim, kHadamardBlock<C::head_dim>>(turned);
    constexpr float block = kHadamardBlock<C::head_dim>;
    typename C::q_t rounded[C::head_dim];
    for_vectors(C::head_dim, [&](std::int64_t i, auto n) { store(rounded + i, load(turned + i, n) / block, n); });
    if constexpr (S::dots) {
      for (std::int64_t i = 0; i < S::words; ++i) {
        const bf16* pair = rounded + i / 4 * 8 + i % 4;
        to[i] = pair[0].bits | std::uint32_t{pair[4].bits} << 16;
      }
    } else {
      for_vectors(C::head_dim,
                  [&](std::int64_t i, auto n) { store(reinterpret_cast<float*>(to) + i, load(rounded + i, n), n); });
    }
  }

  // The softmax before any key: over the sinks alone, if there are any.
  void start(Partial<C>& whole) const {
    whole.clear(rows());
    if constexpr (!std::is_same_v<typename C::sinks_t, none>) {
      for (std::int64_t row = 0; row < rows(); ++row) {
        whole.largest[row] = a_.sinks.template row<const float>(0)[head_of(row)];
        whole.total[row] = 1.f;
      }
    }
  }

  // The softmax over the keys of one span, into `result`.
  void run_span(std::int64_t span, Partial<C>& result) {
    result.clear(rows());
    const Range keys = span_range(span).within(tile_.seen<C>());
    for (std::int64_t start = keys.begin / kBlock * kBlock; start < keys.end; start += kBlock) {
      run_block(start, keys.within({start, start + kBlock}), result);
    }
  }

  // Adds a span's softmax to the whole. A row's first span is copied by weight e^0 = 1.
  void merge_span(std::int64_t span, const Partial<C>& result, Partial<C>& whole) const {
    for (std::int64_t row = 0; row < rows(); ++row) {
      const Range seen = tile_.seen<C>(token_of(row) - tile_.first);
      if (!span_range(span).within(seen).empty()) whole.merge_row(row, result);
    }
  }

  void write(const Partial<C>& whole) const {
    using Out = typename C::out_t;
    const Quantizer<typename C::q_t, Out, typename C::pre_scale_t, typename C::out_scale_t> quantizer(a_.pre_scale,
                                                                                                     a_.out_scale);
    const float v_scale = a_.v_scale.scalar();
    for (std::int64_t row = 0; row < rows(); ++row) {
      const std::int64_t column = head_of(row) * C::value_dim;
      Out* out = a_.out.row<Out>(token_of(row)) + column;
      const float factor = v_scale / whole.total[row];
      for_vectors(C::value_dim, [&](std::int64_t i, auto n) {
        quantizer.store(out + i, column + i, column_sums(whole.row(row), i) * factor, n);
      });
    }
  }

  // The sums of kLanes columns from `first` on.
  static Floats column_sums(const float* sums, std::int64_t first) {
    if constexpr (S::packed) {
      const Floats even = load(sums + first / kPair * kPair), odd = load(sums + first / kPair * kPair + kLanes);
      return first % kPair == 0 ? interleaved<false>(even, odd) : interleaved<true>(even, odd);
    } else {
      return load(sums + first);
    }
  }

  Range spans() const {
    const Range seen = tile_.seen<C>();
    return {seen.begin / kSpan, (seen.end + kSpan - 1) / kSpan};
  }

 private:
  static constexpr Pool kNoKey[S::codes] = {};  // in place of masked keys

  static Range span_range(std::int64_t span) { return {span * kSpan, (span + 1) * kSpan}; }

  std::int64_t rows_of_head() const { return tile_.count * S::group; }
  std::int64_t token_of(std::int64_t row) const { return tile_.first + row / S::group % tile_.count; }
  std::int64_t head_of(std::int64_t row) const {
    return (tile_.kv_head + row / rows_of_head()) * S::group + row % S::group;
  }

  // Calls f(position, row of the first KV head, its scale) for some tokens, with one look at the table a
  // page.
  template <class F>
  void each_token(Half half, Range positions, F&& f) const {
    constexpr std::int64_t stride = C::num_kv_heads * S::codes;
    for (std::int64_t at = positions.begin; at < positions.end;) {
      const std::int64_t page = at / C::page_size, end = smaller((page + 1) * C::page_size, positions.end);
      const Pool* row = token_in_pool<C>(pool_, half, pages_[page], at % C::page_size);
      if constexpr (S::scaled) {
        const auto* pool = static_cast<const Pool*>(a_.pool.data);
        const float* scale = scales_in_pool<C>(pool, half, pages_[page], at % C::page_size) + tile_.kv_head;
        for (; at < end; ++at, row += stride, scale += C::num_kv_heads) f(at, row, scale);
      } else {
        for (; at < end; ++at, row += stride) f(at, row, nullptr);
      }
    }
  }

  // Finds the rows of the block at `start`.
  void find_rows(std::int64_t start, BlockRows<C>& rows) const {
    const Range keys = tile_.seen<C>().within({start, start + kBlock});
    if (keys.end - keys.begin < kBlock) {
      for (std::int64_t i = 0; i < kBlock; ++i) rows.keys[i] = rows.values[i] = kNoKey;
    }
    each_token(Half::keys, keys, [&](std::int64_t position, const Pool* row, const float* scale) {
      rows.keys[position - start] = row;
      if constexpr (S::scaled) rows.key_scales[position - start] = scale;
    });
    if constexpr (C::planes == 1) {
      std::memcpy(rows.values, rows.keys, sizeof rows.keys);
    } else {
      each_token(Half::values, keys, [&](std::int64_t position, const Pool* row, const float* scale) {
        rows.values[position - start] = row;
        if constexpr (S::scaled) rows.value_scales[position - start] = scale;
      });
    }
  }

  // One KV head's share of a block, and what is worked on after it.
  struct Share {
    std::int64_t start;
    Range keys;
    std::int64_t head;
    const BlockRows<C>* rows;
    const BlockRows<C>* next_rows;
    std::int64_t next_head;
  };

  // Gathers the scales of a KV head's keys and values in a block.
  void load_scales(const Share& share) {
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const bool inside = i >= share.keys.begin - share.start && i < share.keys.end - share.start;
      work_.key_scales[i] = inside ? share.rows->key_scales[i][share.head] : 0.f;
      work_.value_scales[i] = inside ? share.rows->value_scales[i][share.head] : 0.f;
    }
  }

  // `keys` are the positions of the block at `start` that some row of the tile sees.
  void run_block(std::int64_t start, Range keys, Partial<C>& result) {
    BlockRows<C>&rows = work_.rows[0], &next = work_.rows[1];
    find_rows(start, rows);
    find_rows(start + kBlock, next);
    for (std::int64_t head = 0; head < tile_.heads; ++head) {
      const bool is_last = head + 1 == tile_.heads;
      run_head({start, keys, head, &rows, is_last ? &next : &rows, is_last ? 0 : head + 1}, result);
    }
  }

  void run_head(const Share& share, Partial<C>& result) {
    const std::int64_t start = share.start;
    const Range keys = share.keys, tokens = tokens_that_see(keys);
    const std::int64_t first = share.head * rows_of_head();
    if constexpr (S::scaled) load_scales(share);
    for (std::int64_t at = 0; at < kBlock; at += kPair) {
      const Range pair = keys.within({start + at, start + at + kPair});
      if (pair.empty()) continue;
      load_keys(share, at, {pair.begin - start, pair.end - start});
      for_rows<kRowsAtOnce>(first + tokens.begin * S::group, first + tokens.end * S::group, [&]<int n>(std::int64_t row) {
        multiply_keys<C, n>(work_.queries + row * S::words, work_.keys, work_.scores + row * kBlock + at);
      });
    }
    for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
      const Range seen = in_block(start, token);
      const std::int64_t row = first + token * S::group;
      for (std::int64_t i = 0; i < S::group; ++i) exponentiate(row + i, seen, result);
    }
    if (rows_of_head() <= kFewRows && C::value_dim == S::columns) {
      // Little is done with a key or value: the next ones are prefetched meanwhile.
      const std::int64_t mine = share.head * S::codes, next = share.next_head * S::codes;
      add_values(first, start, tokens, result, [&](std::int64_t key, std::int64_t column) {
        const std::int64_t at = code_width<Pool>(column);
        __builtin_prefetch(share.next_rows->keys[key] + next + at, 0, 2);
        __builtin_prefetch(share.next_rows->values[key] + next + at, 0, 2);
        return share.rows->values[key] + mine + at;
      });
    } else {
      load_values(share);
      add_values(first, start, tokens, result, [&](std::int64_t key, std::int64_t column) {
        return work_.values + key * S::columns + column;
      });
    }
  }

  Range in_block(std::int64_t start, std::int64_t token) const {
    const Range seen = tile_.seen<C>(token).within({start, start + kBlock});
    return {seen.begin - start, seen.end - start};
  }

  // Both ends of what a token sees grow with the token, so these are consecutive.
  Range tokens_that_see(Range keys) const {
    Range tokens{0, tile_.count};
    while (tile_.seen<C>(tokens.begin).end <= keys.begin) ++tokens.begin;
    while (tile_.seen<C>(tokens.end - 1).begin >= keys.end) --tokens.end;
    return tokens;
  }

  // Transposes the keys of a block from its `first` on into work_.keys; lanes outside of `valid` are
  // zero.
  void load_keys(const Share& share, std::int64_t first, Range valid) {
    constexpr std::int64_t words = C::head_dim / kPerWord<Pool>;
    for (std::int64_t lane = 0; lane < kPair; lane += kLanes) {
      const Pool* rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const std::int64_t key = first + lane + i;
        const bool inside = key >= valid.begin && key < valid.end;
        rows[i] = inside ? share.rows->keys[key] + share.head * S::codes : kNoKey;
      }
      for_vectors(words, [&](std::int64_t word, auto n) {
        Words square[kLanes] = {};
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          std::memcpy(&square[i], rows[i] + code_width<Pool>(word * kPerWord<Pool>), n * sizeof(std::uint32_t));
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          if (i >= n) break;
          store_key_words(square[i], word + i, lane);
        }
      });
    }
  }

  // What one word of kLanes keys in the pool becomes in work_.keys.
  void store_key_words(Words words, std::int64_t word, std::int64_t lane) {
    constexpr int kWords = S::words * kPerWord<Pool> / C::head_dim;
    Words widened[kWords];
    if constexpr (!S::dots) {
      Floats columns[kWords];
      unpack<Pool>(words, columns);
#pragma GCC unroll 8
      for (int e = 0; e < kWords; ++e) widened[e] = bits_of(columns[e]);
    } else if constexpr (std::is_same_v<Pool, bf16>) {
      widened[0] = words;
    } else if constexpr (std::is_same_v<Pool, std::int8_t>) {
      Floats elements[4];  // all are bf16
      unpack<Pool>(words, elements);
      for (int e = 0; e < 2; ++e) widened[e] = bits_of(elements[e]) >> 16 | bits_of(elements[e + 2]);
    } else if constexpr (S::packed) {
#ifdef TRTC_WIDE
      for (int e = 0; e < 4; ++e) widened[e] = i4_to_bf16(words >> (4 * e));  // elements e and e + 4
#endif
    } else {
#ifdef TRTC_WIDE
      widened[0] = f8e4m3_to_bf16(words);
      widened[1] = f8e4m3_to_bf16(words >> 8);
#endif
    }
#pragma GCC unroll 8
    for (int e = 0; e < kWords; ++e) {
      std::memcpy(work_.keys + (word * kWords + e) * kPair + lane, &widened[e], sizeof(Words));
    }
  }

  void load_values(const Share& share) {
    for (std::int64_t key = share.keys.begin - share.start; key < share.keys.end - share.start; ++key) {
      const Pool* from = share.rows->values[key] + share.head * S::codes;
      float* to = work_.values + key * S::columns;
      if constexpr (S::packed) {
        widen_packed(from, to);
      } else {
        for_vectors(C::value_dim, [&](std::int64_t i, auto n) { store(to + i, load(from + i, n)); });
        for (std::int64_t i = round_up(C::value_dim, kLanes); i < S::columns; i += kLanes) store(to + i, Floats{});
      }
    }
  }

  // What lies beyond the head does not matter: no column of the result is there.
  static void widen_packed(const Pool* from, float* to) {
    for (std::int64_t i = 0; i < S::columns; i += kPair) {
      std::uint8_t padded[kLanes] = {};
      std::memcpy(padded, from + i / 2, smaller(kLanes, (C::value_dim - i) / 2));
      const auto [even, odd] = load_packed(padded);
      store(to + i, even);
      store(to + i + kLanes, odd);
    }
  }

  // Turns a row's scores into exponentials relative to its new largest score; unseen keys get 0.
  void exponentiate(std::int64_t row, Range seen, Partial<C>& result) {
    float* scores = work_.scores + row * kBlock;
    const float scale = C::scale * a_.k_scale.scalar();
    const Floats unseen = broadcast(-std::numeric_limits<float>::infinity());
    Floats most = unseen;
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
      const Floats lane = lane_numbers() + static_cast<float>(i);
      Floats score = load(scores + i) * scale;
      if constexpr (S::scaled) score = score * load(work_.key_scales + i);
      if constexpr (C::softcap != 0) score = C::softcap * tanh(score / C::softcap);
      const auto inside = (lane >= static_cast<float>(seen.begin)) & (lane < static_cast<float>(seen.end));
      score = inside ? score : unseen;
      store(scores + i, score);
      most = max(most, score);
    }
    const float before = result.largest[row];
    const float now = Partial<C>::larger_score(before, largest(most));
    Floats total{};
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
      const Floats weight = exp(load(scores + i) - now);
      total = total + weight;
      if constexpr (S::scaled) {
        store(scores + i, weight * load(work_.value_scales + i));
      } else {
        store(scores + i, weight);
      }
    }
    const float correction = exp(broadcast(before) - now)[0];
    result.largest[row] = now;
    result.total[row] = result.total[row] * correction + sum(total);
    float* sums = result.row(row);
    for (std::int64_t d = 0; d < S::columns; d += kLanes) store(sums + d, load(sums + d) * correction);
  }

  // Tokens that see the whole block share each V row; the others take their own range of keys.
  // first: the first of the head's rows.
  template <class ValueOf>
  void add_values(std::int64_t first, std::int64_t start, Range tokens, Partial<C>& result, ValueOf&& value_of) {
    const auto add = [&](Range some, Range keys) {
      for_rows<kRowsAtOnce>(first + some.begin * S::group, first + some.end * S::group, [&]<int n>(std::int64_t row) {
        multiply_values<C, n>(work_.scores + row * kBlock, value_of, keys, result.row(row));
      });
    };
    for (std::int64_t token = tokens.begin; token < tokens.end;) {
      const Range keys = in_block(start, token);
      std::int64_t next = token + 1;
      while (next < tokens.end && in_block(start, next).begin == keys.begin && in_block(start, next).end == keys.end) {
        ++next;
      }
      add({token, next}, keys);
      token = next;
    }
  }

  const Tensors& a_;
  const Tile& tile_;
  Workspace<C>& work_;
  const std::int32_t* pages_;
  const Pool* pool_;
};

template <class C>
Workspace<C>& workspace(const Context& ctx, int thread) {
  return reinterpret_cast<Workspace<C>*>(ctx.scratch)[thread];
}

// Each tile, tile_of(item, its thread), is one thread's.
template <class C, class TileOf>
void run_tiles(Context& ctx, const Tensors& a, std::int64_t count, TileOf&& tile_of) {
  ctx.threads.for_each(count, [&](std::int64_t item, int thread) {
    Workspace<C>& work = workspace<C>(ctx, thread);
    const Tile tile = tile_of(item, thread);
    TileRunner<C> runner(a, tile, work);
    runner.load_queries();
    runner.start(work.whole);
    const Range spans = runner.spans();
    for (std::int64_t span = spans.begin; span < spans.end; ++span) {
      runner.run_span(span, work.span);
      runner.merge_span(span, work.span, work.whole);
    }
    runner.write(work.whole);
  });
}

// Fewer tiles than threads: the threads take the spans of a tile, and then one merges them.
template <class C, class TileOf>
void run_spans(Context& ctx, const Tensors& a, std::int64_t count, TileOf&& tile_of) {
  Partial<C>& whole = workspace<C>(ctx, 0).whole;
  for (std::int64_t item = 0; item < count; ++item) {
    const Tile tile = tile_of(item);
    const TileRunner<C> merger(a, tile, workspace<C>(ctx, 0));
    const Range spans = merger.spans();
    merger.start(whole);
    for (std::int64_t first = spans.begin; first < spans.end; first += ctx.threads.size()) {
      const std::int64_t parts = smaller(ctx.threads.size(), spans.end - first);
      ctx.threads.for_each(parts, [&](std::int64_t part, int thread) {
        TileRunner<C> runner(a, tile, workspace<C>(ctx, thread));
        runner.load_queries();
        runner.run_span(first + part, workspace<C>(ctx, static_cast<int>(part)).span);
      });
      for (std::int64_t part = 0; part < parts; ++part) {
        merger.merge_span(first + part, workspace<C>(ctx, static_cast<int>(part)).span, whole);
      }
    }
    merger.write(whole);
  }
}

template <class C>
std::size_t scratch_bytes(int num_threads) {
  return sizeof(Workspace<C>) * num_threads;
}

template <class C>
void attend(Context& ctx, const Tensors& a) {
  const std::int64_t count = Tiles<C>(a).count();
  if (count < ctx.threads.size()) {
    run_spans<C>(ctx, a, count, [&](std::int64_t item) { return Tiles<C>(a)[item]; });
    return;
  }
  const auto tiles = Tiles<C>::for_threads(a, ctx.threads.size());
  for (int thread = 0; thread < ctx.threads.size(); ++thread) workspace<C>(ctx, thread).tiles = tiles;
  run_tiles<C>(ctx, a, tiles.count(),
               [&](std::int64_t item, int thread) { return workspace<C>(ctx, thread).tiles[item]; });
}

// Some rows of the step, each with a page table of its own and `context` keys.
template <class C>
void attend_rows(Context& ctx, const Tensors& a, const std::int32_t* rows, std::int64_t count, std::int64_t context) {
  static_assert(C::num_kv_heads == 1);
  const auto tile_of = [&](std::int64_t item) { return Tile{rows[item], 0, 1, rows[item], 1, context - 1}; };
  if (count < ctx.threads.size()) {
    run_spans<C>(ctx, a, count, tile_of);
  } else {
    run_tiles<C>(ctx, a, count, [&](std::int64_t item, int) { return tile_of(item); });
  }
}

}  // namespace attention

}  // namespace trtc
