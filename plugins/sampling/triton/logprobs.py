"""Log-probabilities of the likeliest tokens that a mask leaves, and of the drawn one, by the logits
before biases and penalties."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.sampling.triton.edits import before_edit
from trtc.plugins.sampling.triton.keys import key_of, value_of


@triton.jit
def likeliest(
    logits,
    num_logprobs,
    block_max,
    block_sum,
    dims,
    normaliser,
    top_ids,
    top_logprobs,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row. The likeliest tokens are found one by one: the largest remaining logit of
    every block is known, so only the block of the largest of all is read again."""
    NUM_BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    NOTHING: tl.constexpr = -2147483648  # below the key of -inf
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(dims + 2)
    asked = tl.load(num_logprobs + row, mask=is_real, other=-1)
    wait_for_inputs(OVERLAPS)
    if asked >= 0:
        of_row = logits + row * VOCAB
        block = tl.arange(0, BLOCKS_PAD)
        in_row = block < NUM_BLOCKS
        column = tl.arange(0, BLOCK)
        at = row * NUM_BLOCKS + block
        maxima = tl.load(block_max + at, mask=in_row, other=float("-inf"))
        sums = tl.load(block_sum + at, mask=in_row, other=0.0)
        best = tl.max(maxima)
        mass = tl.sum((sums * tl.exp(maxima - best)).to(tl.float64))
        log_of_sum = best + tl.log(mass.to(tl.float32))
        tl.store(normaliser + row, log_of_sum)

        left = tl.where(in_row, key_of(maxima), NOTHING)
        last_place = tl.full([BLOCKS_PAD], -1, tl.int32)
        for number in range(tl.minimum(asked, tl.minimum(WIDTH, VOCAB))):
            key = tl.max(left)
            chosen = tl.min(tl.where(left == key, block, BLOCKS_PAD))
            token = chosen * BLOCK + column
            values = tl.load(of_row + token, mask=token < VOCAB, other=0.0)
            keys = tl.where(token < VOCAB, key_of(values), NOTHING)
            # Equal ones of a block come in order; one taken at a higher key is not in the way.
            taken = tl.max(tl.where(block == chosen, last_place, -1))
            place = tl.min(tl.where((keys == key) & (column > taken), column, BLOCK))
            tl.store(top_ids + row * WIDTH + number, chosen * BLOCK + place)
            tl.store(top_logprobs + row * WIDTH + number, value_of(key) - log_of_sum)
            again = (keys == key) & (column > place)
            has_equal = tl.max(again.to(tl.int32)) > 0
            below = tl.max(tl.where(keys < key, keys, NOTHING))
            is_chosen = block == chosen
            left = tl.where(is_chosen, tl.where(has_equal, key, below), left)
            last_place = tl.where(is_chosen, tl.where(has_equal, place, -1), last_place)


@triton.jit
def drawn_logprobs(
    logits,
    num_logprobs,
    bias_start,
    bias_token_ids,
    seen_start,
    seen_token_ids,
    pending,
    bias_before,
    seen_before,
    pending_token,
    pending_before,
    sampled,
    normaliser,
    dims,
    token_logprobs,
    VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row."""
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(dims + 2)
    asked = tl.load(num_logprobs + row, mask=is_real, other=-1)
    wait_for_inputs(OVERLAPS)
    if asked >= 0:
        token = tl.load(sampled + row)
        value = before_edit(
            tl.load(logits + row * VOCAB + token),
            token,
            row,
            bias_start,
            bias_token_ids,
            seen_start,
            seen_token_ids,
            pending,
            bias_before,
            seen_before,
            pending_token,
            pending_before,
            ENTRIES,
        )
        tl.store(token_logprobs + row, value - tl.load(normaliser + row))
