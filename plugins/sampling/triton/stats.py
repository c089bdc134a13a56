"""Largest logit and sum of weights of every block of BLOCK logits."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs


@triton.jit
def block_stats(
    logits,
    temperature,
    num_logprobs,
    dims,
    block_max,
    block_sum,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program takes BLOCKS blocks of a row.

    A block with NaN has the maximum +inf: either makes the row invalid. Weights are
    exp((logit - block's maximum) / temperature), and are not summed for greedy rows. Without a
    `temperature` it is 1, for the rows that report log-probabilities; others keep theirs.
    """
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    PARTS: tl.constexpr = (NUM_BLOCKS + BLOCKS - 1) // BLOCKS
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    block = tl.program_id(0) % PARTS * BLOCKS + tl.arange(0, BLOCKS)
    is_real = row < tl.load(dims + 2)
    if temperature is None:
        is_wanted = is_real & (tl.load(num_logprobs + row, mask=is_real, other=-1) >= 0)
        by = 1.0
    else:
        is_wanted = is_real
        by = tl.load(temperature + row, mask=is_real, other=0.0)
    wait_for_inputs(OVERLAPS)
    if is_wanted:
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
        values = tl.where(values != values, float("inf"), values)
        largest = tl.max(values, 1)
        tl.store(block_max + row * NUM_BLOCKS + block, largest, mask=block < NUM_BLOCKS)
        if by > 0:
            # A block of nothing but -inf would give NaN.
            reference = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp((values - reference[:, None]) / by)
            total = tl.sum(weights, 1)
            tl.store(block_sum + row * NUM_BLOCKS + block, total, mask=block < NUM_BLOCKS)
