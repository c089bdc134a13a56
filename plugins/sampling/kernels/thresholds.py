"""Top-k, top-p and min-p: the least score that stays, for every row that has one of them.

The score of a logit is its distance to the row's largest, over the temperature. Thresholds are
looked for among distances, by their keys (keys.py):

    top-k    the largest that at least k logits reach
    top-p    the largest such that what reaches it has top_p of the weight that top-k left
    min-p    log(min_p), which is a score

First among candidates in registers: the blocks with the largest maxima, which hold every logit that
reaches the least of these maxima. Where that is not enough, by passes over the whole row.
"""

import triton
import triton.language as tl

from trtc.plugins.cuda.device import launch_dependents, wait_for_inputs
from trtc.plugins.sampling.kernels.keys import key_of, value_of

_LOWEST = tl.constexpr(-2139095041)
"""The key of -inf."""
_ABOVE = tl.constexpr(1)
"""The key after that of 0, the largest distance."""
_PIVOTS = tl.constexpr(8)
"""Keys that a pass over a row tries at once."""
_UNROLLED = tl.constexpr(8)
"""Loads of a thread that are under way at once in such a pass."""


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
    threshold,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row; greedy rows are left alone. `block_sum` loses the weights that do not
    reach the threshold. A pass over the row loads LANES logits at once."""
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
    is_drawn = is_real & (by > 0)
    if is_drawn:
        tl.store(threshold + row, float("-inf"))
    if is_drawn & (has_k | has_p | (least > 0)):
        of_row = logits + row * VOCAB
        block = tl.arange(0, BLOCKS_PAD)
        in_row = block < NUM_BLOCKS
        at = row * NUM_BLOCKS + block
        maxima = tl.load(block_max + at, mask=in_row, other=float("-inf"))
        best = tl.max(maxima)
        if (best > float("-inf")) & (best < float("inf")):
            block_distances = maxima - best
            bound = _bound_of_candidates(block_distances, in_row, CANDIDATES)
            bound_distance = value_of(bound.to(tl.int32))
            is_candidate = in_row & (block_distances >= bound_distance)
            listed = candidates + row * CANDIDATES
            order = tl.cumsum(is_candidate.to(tl.int32)) - 1
            tl.store(listed + order, block, mask=is_candidate)
            tl.debug_barrier()
            entry = tl.arange(0, CANDIDATES)
            is_listed = entry < tl.sum(is_candidate.to(tl.int32))
            chosen = tl.load(listed + entry, mask=is_listed, other=NUM_BLOCKS)
            distances = _distances_of_blocks(of_row, best, chosen, VOCAB, BLOCK)
            reaches = distances >= bound_distance

            cut = tl.full([], _LOWEST, tl.int64)
            if has_k:
                ones = reaches.to(tl.float32)
                goal = k.to(tl.float64)
                if _sum(ones) >= goal:
                    cut = _search_candidates(distances, ones, goal, bound)
                else:
                    cut = _search_row(of_row, best, 0.0, goal, cut, bound, VOCAB, LANES)
            if has_p:
                # Powers of 2; by a factor that is finite however small the temperature is.
                rate = 1.4426950408889634 / tl.maximum(by, 1e-37)
                stays = reaches & (distances >= value_of(cut.to(tl.int32)))
                weights = tl.where(stays, tl.exp2(distances * rate), 0.0)
                held = _sum(weights)
                total = held
                if cut < bound:
                    if has_k:
                        pivots = cut + tl.zeros([_PIVOTS], tl.int64)
                        measured = _measure_row(of_row, best, rate, pivots, VOCAB, LANES)
                        total = tl.max(measured)
                    else:
                        sums = tl.load(block_sum + at, mask=in_row, other=0.0)
                        mass = sums * tl.exp(tl.div_rn(block_distances, by))
                        total = tl.sum(mass.to(tl.float64))
                goal = total * p.to(tl.float64)
                if held >= goal:
                    low = tl.maximum(bound, cut)
                    cut = _search_candidates(distances, weights, goal, low)
                else:
                    # What lies lower has together less than 1 - p.
                    rest = (total - goal).to(tl.float32) / VOCAB
                    lowest = key_of((tl.log2(rest) - 0.01) / rate).to(tl.int64)
                    low = tl.maximum(tl.minimum(lowest, bound - 1), cut)
                    cut = _search_row(of_row, best, rate, goal, low, bound, VOCAB, LANES)
            limit = tl.div_rn(value_of(cut.to(tl.int32)), by)
            if least > 0:
                limit = tl.maximum(limit, tl.log(least))
            tl.store(threshold + row, limit)

            # Sums without what is below the limit.
            block_scores = tl.div_rn(block_distances, by)
            is_other = in_row & (block_distances < bound_distance)
            if tl.max((is_other & (block_scores >= limit)).to(tl.int32)) == 0:
                tl.store(block_sum + at, tl.zeros([BLOCKS_PAD], tl.float32), mask=is_other)
                sums = _sums_of_blocks(distances, limit, by)
                tl.store(block_sum + row * NUM_BLOCKS + chosen, sums, mask=is_listed)
            else:
                PART: tl.constexpr = _UNROLLED * LANES // BLOCK
                for first in range(0, NUM_BLOCKS, PART):
                    part = first + tl.arange(0, PART)
                    distances = _distances_of_blocks(of_row, best, part, VOCAB, BLOCK)
                    sums = _sums_of_blocks(distances, limit, by)
                    tl.store(block_sum + row * NUM_BLOCKS + part, sums, mask=part < NUM_BLOCKS)


@triton.jit
def _bound_of_candidates(block_distances, in_row, CANDIDATES: tl.constexpr):
    """The least key that at most CANDIDATES maxima reach: none of several that are equal, if not
    all of them fit."""
    low = tl.full([], _LOWEST, tl.int64)
    above = tl.full([], _ABOVE, tl.int64)
    while above - low > 1:
        middle = (low + above) // 2
        reaches = in_row & (block_distances >= value_of(middle.to(tl.int32)))
        fits = tl.sum(reaches.to(tl.int32)) <= CANDIDATES
        low = tl.where(fits, low, middle)
        above = tl.where(fits, middle, above)
    return above


@triton.jit
def _search_candidates(distances, weights, goal, low):
    """The largest key that weights of at least `goal` reach; `low` is such a key."""
    above = tl.full([], _ABOVE, tl.int64)
    while above - low > 1:
        middle = (low + above) // 2
        reaches = distances >= value_of(middle.to(tl.int32))
        is_enough = _sum(tl.where(reaches, weights, 0.0)) >= goal
        low = tl.where(is_enough, middle, low)
        above = tl.where(is_enough, above, middle)
    return low


@triton.jit
def _search_row(of_row, best, rate, goal, low, above, VOCAB: tl.constexpr, LANES: tl.constexpr):
    """`_search_candidates` over the whole row and the keys of [low, above)."""
    index = tl.arange(0, _PIVOTS)
    while above - low > 1:
        step = (above - low + _PIVOTS) // (_PIVOTS + 1)
        pivots = tl.minimum(low + (index + 1) * step, above)
        measured = _measure_row(of_row, best, rate, pivots, VOCAB, LANES)
        is_enough = (measured >= goal) & (pivots < above)
        number = tl.max(tl.where(is_enough, index + 1, 0))
        above = tl.minimum(low + (number + 1) * step, above)
        low += number * step
    return low


@triton.jit
def _measure_row(of_row, best, rate, pivots, VOCAB: tl.constexpr, LANES: tl.constexpr):
    """[_PIVOTS] f64: the weight of what reaches each of the keys; with a rate of 0, the number."""
    least = value_of(pivots.to(tl.int32))[:, None]
    measured = tl.zeros([_PIVOTS, LANES], tl.float32)
    for first in range(0, VOCAB, _UNROLLED * LANES):
        for number in tl.static_range(_UNROLLED):
            token = first + number * LANES + tl.arange(0, LANES)
            # NaN reaches nothing.
            values = tl.load(of_row + token, mask=token < VOCAB, other=float("nan"))
            distances = values - best
            # -inf times a rate of 0 is NaN.
            weights = tl.where(rate > 0, tl.exp2(distances * rate), 1.0)
            measured += tl.where(distances[None, :] >= least, weights[None, :], 0.0)
    return tl.sum(measured.to(tl.float64), 1)


@triton.jit
def _sum(weights):
    """f64, of f32 sums of blocks."""
    return tl.sum(tl.sum(weights, 1).to(tl.float64))


@triton.jit
def _distances_of_blocks(of_row, best, blocks, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """[blocks, BLOCK] distances; NaN, which reaches nothing, past the end of the row."""
    token = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(of_row + token, mask=token < VOCAB, other=float("nan")) - best


@triton.jit
def _sums_of_blocks(distances, limit, by):
    """[blocks] weights of what reaches the limit, relative to each block's own maximum."""
    largest = tl.max(distances, 1)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp((distances - reference[:, None]) / by)
    return tl.sum(tl.where(tl.div_rn(distances, by) >= limit, weights, 0.0), 1)
