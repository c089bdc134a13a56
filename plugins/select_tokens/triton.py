"""Scores of the keys that a row sees, and the choice among them, in Triton.

Scores lie in memory as numbers in their order: the choice finds the least that is selected by
counting, eight bits at a time, and then writes the slots of what reaches it in one pass.
"""

import triton
import triton.language as tl


@triton.jit
def find_row(row, query_start, context_lens, num_sequences, SEQUENCES: tl.constexpr):
    """The sequence of a row, and how many tokens it sees."""
    number = tl.arange(0, SEQUENCES)
    ends = tl.load(query_start + number + 1, mask=number < num_sequences, other=1 << 30)
    sequence = tl.sum((ends <= row).to(tl.int32), 0)
    left = tl.load(query_start + sequence + 1) - row
    return sequence, tl.load(context_lens + sequence) - left + 1


@triton.jit
def slots_of(position, inside, pages, PAGE_SIZE: tl.constexpr):
    page = tl.load(pages + position // PAGE_SIZE, mask=inside, other=0)
    return page * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def _order_of(scores):
    """Unsigned numbers in the order of scores: NaN is the smallest, and -0 is 0."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)
    order = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(scores == scores, order, 0)


@triton.jit
def score_keys(
    q,
    weights,
    pool,
    pages,
    begin,
    end,
    order,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """order[position] of keys [begin, end) for one row; `q`, `weights` and `order` are the row's,
    and begin is a multiple of BLOCK_N."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, WIDTH_PAD)
    in_width = (column < WIDTH)[None, :]
    for block in range(begin, end, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        live = position < end
        slot = slots_of(position, live, pages, PAGE_SIZE).to(tl.int64)
        keys = tl.load(
            pool + slot[:, None] * WIDTH + column[None, :], mask=live[:, None] & in_width, other=0.0
        ).to(DTYPE)
        scores = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, NUM_HEADS, HEADS):
            head = first + tl.arange(0, HEADS)
            is_head = head < NUM_HEADS
            queries = tl.load(
                q + head[:, None] * WIDTH + column[None, :],
                mask=is_head[:, None] & in_width,
                other=0.0,
            )
            products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            by = tl.load(weights + head, mask=is_head, other=0.0)
            scores += tl.sum(tl.where(products < 0.0, 0.0, products) * by[:, None], 0)
        tl.store(order + position, _order_of(scores).to(tl.int32, bitcast=True), mask=live)


@triton.jit
def select_largest(
    order,
    seen,
    pages,
    selected,
    TOP_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slots of the TOP_K largest of order[0, seen), the earlier of equal ones, by position."""
    BITS: tl.constexpr = 8
    DIGITS: tl.constexpr = 1 << BITS
    digits = tl.arange(0, DIGITS)
    least = tl.zeros([], tl.uint32)
    wanted = tl.full([], TOP_K, tl.int32)
    for shift in tl.static_range(32 - BITS, -1, -BITS):
        counts = tl.zeros([DIGITS], tl.int32)
        for begin in range(0, seen, BLOCK):
            keys, candidate = _load(order, begin, seen, BLOCK)
            if shift + BITS < 32:
                candidate = candidate & ((keys >> (shift + BITS)) == least)
            digit = ((keys >> shift) & (DIGITS - 1)).to(tl.int32)
            counts += tl.histogram(digit, DIGITS, candidate)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        found = tl.sum((above >= wanted).to(tl.int32), 0)
        wanted -= tl.sum(tl.where(digits == found, above, 0), 0)
        least = (least << BITS) | found.to(tl.uint32)
    taken = tl.zeros([], tl.int32)
    equal_before = tl.zeros([], tl.int32)
    for begin in range(0, seen, BLOCK):
        keys, live = _load(order, begin, seen, BLOCK)
        equal = live & (keys == least)
        rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)
        takes = live & ((keys > least) | (equal & (rank <= wanted)))
        place = taken + tl.cumsum(takes.to(tl.int32), 0) - 1
        slot = slots_of(begin + tl.arange(0, BLOCK), takes, pages, PAGE_SIZE)
        tl.store(selected + place, slot, mask=takes)
        taken += tl.sum(takes.to(tl.int32), 0)
        equal_before += tl.sum(equal.to(tl.int32), 0)


@triton.jit
def select_all(
    seen,
    pages,
    selected,
    TOP_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slots of all tokens that a row sees, and -1 behind them."""
    for begin in range(0, TOP_K, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        is_seen = position < seen
        slot = slots_of(position, is_seen, pages, PAGE_SIZE)
        tl.store(selected + position, tl.where(is_seen, slot, -1), mask=position < TOP_K)


@triton.jit
def _load(order, begin, seen, BLOCK: tl.constexpr):
    position = begin + tl.arange(0, BLOCK)
    live = position < seen
    return tl.load(order + position, mask=live, other=0).to(tl.uint32, bitcast=True), live
