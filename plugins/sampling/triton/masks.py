"""Applies masks: logits of tokens that a row may not sample become -inf."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs


@triton.jit
def mask(
    logits,
    mask_index,
    mask_words,
    dims,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program takes WORDS words of a row's mask. A row without a mask has the index -1."""
    ROW_WORDS: tl.constexpr = (VOCAB + 31) // 32
    PARTS: tl.constexpr = (ROW_WORDS + WORDS - 1) // WORDS
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    word = tl.program_id(0) % PARTS * WORDS + tl.arange(0, WORDS)
    is_real = row < tl.load(dims + 2)
    index = tl.load(mask_index + row, mask=is_real, other=-1).to(tl.int64)
    wait_for_inputs(OVERLAPS)
    if index >= 0:
        bits = tl.load(mask_words + index * ROW_WORDS + word, mask=word < ROW_WORDS, other=0)
        bit = tl.arange(0, 32)
        token = word[:, None] * 32 + bit[None, :]
        of_token = logits + row * VOCAB + token
        values = tl.load(of_token, mask=token < VOCAB, other=float("-inf"))
        is_allowed = ((bits[:, None] >> bit[None, :]) & 1) != 0
        # NaN and +inf stay: they make a row invalid, whatever it may draw.
        tl.store(
            of_token, float("-inf"), mask=(token < VOCAB) & ~is_allowed & (values < float("inf"))
        )
