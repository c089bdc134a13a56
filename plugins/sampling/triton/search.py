"""Search for a threshold in whole rows, all programs of a row at once.

The range of keys (keys.py) that holds the threshold shrinks launch by launch: every program of a
row measures, for the same PIVOTS keys in the range, the weight of what reaches them in its part of
the row; the next launch adds the parts up, in every program alike, and goes on in the smaller
range. Launches alternate between two places for range and measures, so that none reads what it
writes. `finish` takes the last range, and leaves what does not reach the threshold out of the
blocks' sums.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.sampling.tensors import SEARCH_PIVOTS, SEARCH_UNROLLED
from trtc.plugins.sampling.triton.keys import value_of

LOWEST = tl.constexpr(-2139095041)
"""The key of -inf."""
ABOVE = tl.constexpr(1)
"""The key after that of 0, the largest distance."""
PIVOTS = tl.constexpr(SEARCH_PIVOTS)
"""Keys that a launch tries at once: a range shrinks to a ninth."""

DONE = tl.constexpr(0)
"""Mode of a row: its threshold is known, and its sums are right."""
SUM = tl.constexpr(1)
"""Its threshold is known."""
SEARCH = tl.constexpr(2)
"""Its range is."""
_UNROLLED = tl.constexpr(SEARCH_UNROLLED)
"""Loads of a thread that are in flight at once."""


@triton.jit
def search(
    logits,
    temperature,
    block_max,
    dims,
    search_mode,
    search_goal,
    search_range,
    search_masses,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    LANES: tl.constexpr,
    NUMBER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The first launch, which has no measures before it (NUMBER 0), an odd or an even one after it
    (1 or 2). A program takes a part of a row, of _UNROLLED * LANES logits."""
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    is_real = row < tl.load(dims + 2)
    by = tl.load(temperature + row, mask=is_real, other=1.0)
    wait_for_inputs(OVERLAPS)
    mode = tl.load(search_mode + row, mask=is_real, other=0)
    if mode == SEARCH:
        goal = tl.load(search_goal + row)
        low, above = _range(search_range, search_masses, row, goal, NUMBER, PARTS, PARTS_PAD)
        if part == 0:
            place = search_range + row * 4 + (NUMBER + 1) % 2 * 2
            tl.store(place, low.to(tl.int32))
            tl.store(place + 1, above.to(tl.int32))
        if above - low > 1:
            block = tl.arange(0, BLOCKS_PAD)
            maxima = tl.load(
                block_max + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=float("-inf")
            )
            first = part * (_UNROLLED * LANES)
            measured = measure(
                logits + row * VOCAB,
                tl.max(maxima),
                rate_of(by),
                pivots_of(low, above),
                first,
                first + _UNROLLED * LANES,
                VOCAB,
                LANES,
            )
            place = search_masses + (row * 2 + (NUMBER + 1) % 2) * (PARTS * PIVOTS)
            index = tl.arange(0, PIVOTS)
            tl.store(place + part * PIVOTS + index, measured.to(tl.float32))


@triton.jit
def finish(
    logits,
    temperature,
    min_p,
    block_max,
    block_sum,
    dims,
    search_mode,
    search_goal,
    search_range,
    search_masses,
    threshold,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """After an even number of searches; a program takes the blocks of a part of a row."""
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    PART: tl.constexpr = _UNROLLED * LANES // BLOCK
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    is_real = row < tl.load(dims + 2)
    by = tl.load(temperature + row, mask=is_real, other=1.0)
    least = tl.load(min_p + row, mask=is_real, other=0.0)
    wait_for_inputs(OVERLAPS)
    mode = tl.load(search_mode + row, mask=is_real, other=0)
    if mode != DONE:
        if mode == SEARCH:
            goal = tl.load(search_goal + row)
            low, _above = _range(search_range, search_masses, row, goal, 2, PARTS, PARTS_PAD)
            limit = tl.div_rn(value_of(low.to(tl.int32)), by)
            if least > 0:
                limit = tl.maximum(limit, tl.log(least))
            if part == 0:
                tl.store(threshold + row, limit)
        else:
            limit = tl.load(threshold + row)
        block = tl.arange(0, BLOCKS_PAD)
        maxima = tl.load(
            block_max + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=float("-inf")
        )
        mine = part * PART + tl.arange(0, PART)
        distances = distances_of_blocks(logits + row * VOCAB, tl.max(maxima), mine, VOCAB, BLOCK)
        sums = sums_of_blocks(distances, limit, by)
        tl.store(block_sum + row * NUM_BLOCKS + mine, sums, mask=mine < NUM_BLOCKS)


@triton.jit
def _range(
    search_range,
    search_masses,
    row,
    goal,
    NUMBER: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """The range before launch NUMBER: what the launch before wrote, shrunk by its measures."""
    place = search_range + row * 4 + NUMBER % 2 * 2
    low = tl.load(place).to(tl.int64)
    above = tl.load(place + 1).to(tl.int64)
    if NUMBER > 0 and above - low > 1:
        part = tl.arange(0, PARTS_PAD)
        masses = tl.load(
            search_masses
            + (row * 2 + NUMBER % 2) * (PARTS * PIVOTS)
            + part[:, None] * PIVOTS
            + tl.arange(0, PIVOTS)[None, :],
            mask=(part < PARTS)[:, None],
            other=0.0,
        )
        low, above = narrowed(low, above, tl.sum(masses.to(tl.float64), 0), goal)
    return low, above


@triton.jit
def pivots_of(low, above):
    """[PIVOTS] keys that divide the range [low, above), the last ones perhaps at its end."""
    step = (above - low + PIVOTS) // (PIVOTS + 1)
    return tl.minimum(low + (tl.arange(0, PIVOTS) + 1) * step, above)


@triton.jit
def narrowed(low, above, measured, goal):
    """The part of [low, above) in which the weight that reaches a key falls below `goal`, from what
    reaches its `pivots_of`."""
    index = tl.arange(0, PIVOTS)
    step = (above - low + PIVOTS) // (PIVOTS + 1)
    is_enough = (measured >= goal) & (pivots_of(low, above) < above)
    number = tl.max(tl.where(is_enough, index + 1, 0))
    return low + number * step, tl.minimum(low + (number + 1) * step, above)


@triton.jit
def measure(of_row, best, rate, pivots, first, end, VOCAB: tl.constexpr, LANES: tl.constexpr):
    """[PIVOTS] f64: the weight of what reaches each of the keys among the logits from `first` to
    `end`, in steps of _UNROLLED * LANES; with a rate of 0, the number."""
    least = value_of(pivots.to(tl.int32))[:, None]
    measured = tl.zeros([PIVOTS, LANES], tl.float32)
    for begin in range(first, end, _UNROLLED * LANES):
        for number in tl.static_range(_UNROLLED):
            token = begin + number * LANES + tl.arange(0, LANES)
            # NaN reaches nothing.
            values = tl.load(of_row + token, mask=token < VOCAB, other=float("nan"))
            distances = values - best
            # -inf times a rate of 0 is NaN.
            weights = tl.where(rate > 0, tl.exp2(distances * rate), 1.0)
            measured += tl.where(distances[None, :] >= least, weights[None, :], 0.0)
    return tl.sum(measured.to(tl.float64), 1)


@triton.jit
def rate_of(by):
    """Weights are 2 ** (distance * rate): finite however small the temperature is."""
    return 1.4426950408889634 / tl.maximum(by, 1e-37)


@triton.jit
def distances_of_blocks(of_row, best, blocks, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """[blocks, BLOCK] distances; NaN, which reaches nothing, past the end of the row."""
    token = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(of_row + token, mask=token < VOCAB, other=float("nan")) - best


@triton.jit
def sums_of_blocks(distances, limit, by):
    """[blocks] weights of what reaches the limit, relative to each block's own maximum."""
    largest = tl.max(distances, 1)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp((distances - reference[:, None]) / by)
    return tl.sum(tl.where(tl.div_rn(distances, by) >= limit, weights, 0.0), 1)
