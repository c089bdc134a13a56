"""Samples a token for every row: the argmax, or the token at which the cumulative sum passes
`random`."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs


@triton.jit
def draw(
    logits,
    temperature,
    random,
    block_max,
    block_sum,
    threshold,
    dims,
    sampled,
    invalid,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row. Scores are (logit - the row's largest) / temperature; with a `threshold`
    those below it have no weight, and `block_sum` leaves them out."""
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(dims + 2)
    by = tl.load(temperature + row, mask=is_real, other=0.0)
    upper = tl.load(random + row * 2, mask=is_real, other=0)
    lower = tl.load(random + row * 2 + 1, mask=is_real, other=0)
    wait_for_inputs(OVERLAPS)
    if is_real:
        block = tl.arange(0, BLOCKS_PAD)
        in_row = block < NUM_BLOCKS
        column = tl.arange(0, BLOCK)
        maxima = tl.load(block_max + row * NUM_BLOCKS + block, mask=in_row, other=float("-inf"))
        best = tl.max(maxima)
        is_valid = (best > float("-inf")) & (best < float("inf"))
        chosen = 0
        place = 0
        if is_valid & (by <= 0):
            chosen = tl.min(tl.where(maxima == best, block, BLOCKS_PAD))
            token = chosen * BLOCK + column
            values = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
            place = tl.min(tl.where(values == best, column, BLOCK))
        elif is_valid:
            sums = tl.load(block_sum + row * NUM_BLOCKS + block, mask=in_row, other=0.0)
            mass = (sums * tl.exp(tl.div_rn(maxima - best, by))).to(tl.float64)
            passed = tl.cumsum(mass)
            number = upper.to(tl.float64) * 134217728.0 + lower.to(tl.float64)
            target = number * 1.1102230246251565e-16 * tl.max(passed)
            chosen = _first_above(passed, target, mass, block, BLOCKS_PAD)
            before = tl.sum(tl.where(block < chosen, mass, 0.0))
            token = chosen * BLOCK + column
            values = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
            scores = tl.div_rn(values - best, by)
            weights = tl.exp(scores)
            if threshold is not None:
                weights = tl.where(scores >= tl.load(threshold + row), weights, 0.0)
            wide = weights.to(tl.float64)
            place = _first_above(tl.cumsum(wide), target - before, wide, column, BLOCK)
        tl.store(sampled + row, chosen * BLOCK + place)
        tl.store(invalid + row, 1 - is_valid.to(tl.int32))


@triton.jit
def _first_above(passed, target, weights, index, LENGTH: tl.constexpr):
    """The first index with a weight at which the running sum passes the target. If rounding keeps
    the sum below it, the last index with a weight."""
    counts = weights > 0
    first = tl.min(tl.where(counts & (passed > target), index, LENGTH))
    last = tl.max(tl.where(counts, index, 0))
    return tl.minimum(first, last)
