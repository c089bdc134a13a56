"""Top-k, top-p and min-p: the least score that stays, for every row that has one of them.

The score of a logit is its distance to the row's largest, over the temperature. Thresholds are
looked for among distances:

    top-k    the largest that at least k logits reach
    top-p    the largest such that what reaches it has top_p of the weight that top-k left
    min-p    log(min_p), which is a score

`thresholds` looks among a row's candidates: the blocks with the largest maxima hold every logit
that reaches the least of these maxima, and mostly these few hundred are enough. Where they are not,
top-p is left to search.py, all of whose programs work on a row at once. Top-k, which seldom keeps
so many, is searched here, by passes over the row.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.sampling.triton.keys import key_of, value_of
from trtc.plugins.sampling.triton.search import (
    ABOVE,
    DONE,
    LOWEST,
    PIVOTS,
    SEARCH,
    SUM,
    distances_of_blocks,
    measure,
    narrowed,
    pivots_of,
    rate_of,
    sums_of_blocks,
)

_BOUND_PIVOTS = tl.constexpr(16)
_BLOCKS_AT_ONCE = tl.constexpr(32)
"""Candidate blocks in registers."""
_LISTED_AT_ONCE = tl.constexpr(32)
"""Listed distances with which all are compared at once."""


@triton.jit
def thresholds(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    block_max,
    block_sum,
    dims,
    candidates,
    listed,
    threshold,
    search_mode,
    search_goal,
    search_range,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LISTED: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row. `block_sum` loses the weights that do not reach the threshold.

    LISTED: candidate logits that are ranked at once. A pass over the row loads LANES logits at
    once.
    """
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(dims + 2)
    by = tl.load(temperature + row, mask=is_real, other=0.0)
    k = tl.load(top_k + row, mask=is_real, other=0)
    p = tl.load(top_p + row, mask=is_real, other=1.0)
    least = tl.load(min_p + row, mask=is_real, other=0.0)
    wait_for_inputs(OVERLAPS)
    has_k = (k > 0) & (k < VOCAB)
    has_p = p < 1
    if is_real:
        mode = tl.full([], DONE, tl.int32)
        limit = tl.full([], float("-inf"), tl.float32)
        of_row = logits + row * VOCAB
        block = tl.arange(0, BLOCKS_PAD)
        in_row = block < NUM_BLOCKS
        at = row * NUM_BLOCKS + block
        maxima = tl.load(block_max + at, mask=in_row, other=float("-inf"))
        best = tl.max(maxima)
        is_valid = (best > float("-inf")) & (best < float("inf"))
        if is_valid & (by > 0) & (has_k | has_p | (least > 0)):
            block_distances = maxima - best
            bound = _bound_of_candidates(block_distances, in_row, CANDIDATES)
            bound_distance = value_of(bound.to(tl.int32))
            is_candidate = in_row & (block_distances >= bound_distance)
            num_candidates = tl.sum(is_candidate.to(tl.int32))
            chosen = candidates + row * CANDIDATES
            order = tl.cumsum(is_candidate.to(tl.int32)) - 1
            tl.store(chosen + order, block, mask=is_candidate)
            tl.debug_barrier()
            rate = rate_of(by)

            cut = tl.full([], LOWEST, tl.int64)
            if has_k | has_p:
                number, held = _list(
                    of_row,
                    best,
                    bound_distance,
                    rate,
                    chosen,
                    num_candidates,
                    listed + row * LISTED,
                    VOCAB,
                    BLOCK,
                    LISTED,
                )
                ranked, counts, masses = _rank(listed + row * LISTED, rate, LISTED)
                is_ranked = number <= LISTED
                if has_k:
                    if is_ranked & (number >= k):
                        cut = _largest_key(ranked, counts >= k)
                    else:
                        low = tl.where(number >= k, bound, cut)
                        above = tl.where(number >= k, ABOVE, bound)
                        goal = k.to(tl.float64)
                        cut = _search_row(of_row, best, 0.0, goal, low, above, VOCAB, LANES)
                if has_p:
                    if has_k & (cut >= bound) & is_ranked:
                        kept = tl.where(ranked >= value_of(cut.to(tl.int32)), masses, 0.0)
                        total = tl.max(kept).to(tl.float64)
                    elif has_k:
                        pivots = cut + tl.zeros([PIVOTS], tl.int64)
                        measured = measure(of_row, best, rate, pivots, 0, VOCAB, VOCAB, LANES)
                        total = tl.max(measured)
                    else:
                        sums = tl.load(block_sum + at, mask=in_row, other=0.0)
                        mass = sums * tl.exp(tl.div_rn(block_distances, by))
                        total = tl.sum(mass.to(tl.float64))
                    goal = total * p.to(tl.float64)
                    if is_ranked & (held >= goal):
                        cut = tl.maximum(cut, _largest_key(ranked, masses >= goal))
                    else:
                        # What lies lower has together less than 1 - p.
                        rest = (total - goal).to(tl.float32) / VOCAB
                        lowest = key_of((tl.log2(rest) - 0.01) / rate).to(tl.int64)
                        low = tl.where(held >= goal, bound, tl.minimum(lowest, bound - 1))
                        low = tl.maximum(low, cut)
                        above = tl.where(held >= goal, ABOVE, bound)
                        if has_k:
                            cut = _search_row(of_row, best, rate, goal, low, above, VOCAB, LANES)
                        else:
                            mode = tl.full([], SEARCH, tl.int32)
                            tl.store(search_goal + row, goal.to(tl.float32))
                            tl.store(search_range + row * 4, low.to(tl.int32))
                            tl.store(search_range + row * 4 + 1, above.to(tl.int32))
            limit = tl.div_rn(value_of(cut.to(tl.int32)), by)
            if least > 0:
                limit = tl.maximum(limit, tl.log(least))

            if mode == DONE:
                # Sums without what is below the limit: here, if no other block reaches it.
                is_other = in_row & (block_distances < bound_distance)
                others = is_other & (tl.div_rn(block_distances, by) >= limit)
                if tl.max(others.to(tl.int32)) == 0:
                    nothing = tl.zeros([BLOCKS_PAD], tl.float32)
                    tl.store(block_sum + at, nothing, mask=is_other)
                    for first in range(0, num_candidates, _BLOCKS_AT_ONCE):
                        entry = first + tl.arange(0, _BLOCKS_AT_ONCE)
                        is_entry = entry < num_candidates
                        mine = tl.load(chosen + entry, mask=is_entry, other=NUM_BLOCKS)
                        distances = distances_of_blocks(of_row, best, mine, VOCAB, BLOCK)
                        sums = sums_of_blocks(distances, limit, by)
                        tl.store(block_sum + row * NUM_BLOCKS + mine, sums, mask=is_entry)
                else:
                    mode = tl.full([], SUM, tl.int32)
        tl.store(threshold + row, limit)
        tl.store(search_mode + row, mode)


@triton.jit
def _bound_of_candidates(block_distances, in_row, CANDIDATES: tl.constexpr):
    """The least key that at most CANDIDATES maxima reach: none of several that are equal, if not
    all of them fit."""
    index = tl.arange(0, _BOUND_PIVOTS)
    low = tl.full([], LOWEST - 1, tl.int64)
    above = tl.full([], ABOVE, tl.int64)
    while above - low > 1:
        step = (above - low + _BOUND_PIVOTS) // (_BOUND_PIVOTS + 1)
        pivots = tl.minimum(low + (index + 1) * step, above)
        least = value_of(pivots.to(tl.int32))[:, None]
        reaches = in_row[None, :] & (block_distances[None, :] >= least)
        fits = tl.sum(reaches.to(tl.int32), 1) <= CANDIDATES
        first = tl.min(tl.where(fits, index, _BOUND_PIVOTS))
        above = tl.minimum(low + (first + 1) * step, above)
        low += first * step
    return above


@triton.jit
def _list(
    of_row,
    best,
    bound_distance,
    rate,
    chosen,
    num_candidates,
    listed,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Write the distances that reach the bound to `listed`, as many as fit, and -inf after the
    last; return their number and, f64, their weight."""
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    tl.store(listed + tl.arange(0, LISTED), tl.full([LISTED], float("-inf"), tl.float32))
    tl.debug_barrier()
    number = tl.full([], 0, tl.int32)
    held = tl.full([], 0.0, tl.float64)
    for first in range(0, num_candidates, _BLOCKS_AT_ONCE):
        entry = first + tl.arange(0, _BLOCKS_AT_ONCE)
        block = tl.load(chosen + entry, mask=entry < num_candidates, other=NUM_BLOCKS)
        distances = distances_of_blocks(of_row, best, block, VOCAB, BLOCK)
        reaches = distances >= bound_distance
        in_block = tl.sum(reaches.to(tl.int32), 1)
        before = number + tl.cumsum(in_block) - in_block
        place = before[:, None] + tl.cumsum(reaches.to(tl.int32), 1) - 1
        tl.store(listed + place, distances, mask=reaches & (place < LISTED))
        number += tl.sum(in_block)
        weights = tl.where(reaches, tl.exp2(distances * rate), 0.0)
        held += tl.sum(tl.sum(weights, 1).to(tl.float64))
    tl.debug_barrier()
    return number, held


@triton.jit
def _rank(listed, rate, LISTED: tl.constexpr):
    """The list, and for each of its distances the number and the weight of those as large."""
    ranked = tl.load(listed + tl.arange(0, LISTED))
    counts = tl.zeros([LISTED], tl.int32)
    masses = tl.zeros([LISTED], tl.float32)
    for first in range(0, LISTED, _LISTED_AT_ONCE):
        other = tl.load(listed + first + tl.arange(0, _LISTED_AT_ONCE))
        is_larger = (other[:, None] >= ranked[None, :]) & (other > float("-inf"))[:, None]
        counts += tl.sum(is_larger.to(tl.int32), 0)
        masses += tl.sum(tl.where(is_larger, tl.exp2(other * rate)[:, None], 0.0), 0)
    return ranked, counts, masses


@triton.jit
def _largest_key(ranked, is_enough):
    """i64 key of the largest distance that is enough; LOWEST if none is."""
    return key_of(tl.max(tl.where(is_enough, ranked, float("-inf")))).to(tl.int64)


@triton.jit
def _search_row(of_row, best, rate, goal, low, above, VOCAB: tl.constexpr, LANES: tl.constexpr):
    """The largest key of [low, above) that weights of at least `goal` reach; `low` is such a key.
    With a rate of 0 every weight is 1."""
    while above - low > 1:
        pivots = pivots_of(low, above)
        measured = measure(of_row, best, rate, pivots, 0, VOCAB, VOCAB, LANES)
        low, above = narrowed(low, above, measured, goal)
    return low
