"""Biases and penalties, applied to the logits in place, and taken back."""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs


@triton.jit
def edit(
    logits,
    bias_start,
    bias_token_ids,
    bias_values,
    seen_start,
    seen_token_ids,
    seen_counts,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    dims,
    bias_before,
    seen_before,
    VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row, ENTRIES entries at once: first all biases, then all penalties."""
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(dims + 2)
    repetition = tl.load(repetition_penalty + row, mask=is_real, other=1.0)
    presence = tl.load(presence_penalty + row, mask=is_real, other=0.0)
    frequency = tl.load(frequency_penalty + row, mask=is_real, other=0.0)
    bias_begin = tl.load(bias_start + row, mask=is_real, other=0)
    bias_end = tl.load(bias_start + row + 1, mask=is_real, other=0)
    seen_begin = tl.load(seen_start + row, mask=is_real, other=0)
    seen_end = tl.load(seen_start + row + 1, mask=is_real, other=0)
    wait_for_inputs(OVERLAPS)
    of_row = logits + row * VOCAB
    for begin in range(bias_begin, bias_end, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        inside = entry < bias_end
        token = tl.load(bias_token_ids + entry, mask=inside, other=0)
        value = tl.load(of_row + token, mask=inside, other=0.0)
        tl.store(bias_before + entry, value, mask=inside)
        more = tl.load(bias_values + entry, mask=inside, other=0.0)
        tl.store(of_row + token, value + more, mask=inside)
    # A token may have both: the penalty is on what the bias left.
    tl.debug_barrier()
    for begin in range(seen_begin, seen_end, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        inside = entry < seen_end
        token = tl.load(seen_token_ids + entry, mask=inside, other=0)
        count = tl.load(seen_counts + entry, mask=inside, other=0)
        value = tl.load(of_row + token, mask=inside, other=0.0)
        tl.store(seen_before + entry, value, mask=inside)
        scaled = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        # A tiny or huge penalty must not make a finite logit infinite, which is an invalid row.
        is_finite = (value > float("-inf")) & (value < float("inf"))
        scaled = tl.where(is_finite, tl.clamp(scaled, -3.4e38, 3.4e38), scaled)
        scaled -= tl.where(count > 0, presence, 0.0)
        scaled -= frequency * count
        tl.store(of_row + token, scaled, mask=inside)


@triton.jit
def restore(
    logits,
    bias_start,
    bias_token_ids,
    seen_start,
    seen_token_ids,
    bias_before,
    seen_before,
    dims,
    VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Undo `edit`, last change first."""
    launch_dependents(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    is_real = row < tl.load(dims + 2)
    bias_begin = tl.load(bias_start + row, mask=is_real, other=0)
    bias_end = tl.load(bias_start + row + 1, mask=is_real, other=0)
    seen_begin = tl.load(seen_start + row, mask=is_real, other=0)
    seen_end = tl.load(seen_start + row + 1, mask=is_real, other=0)
    wait_for_inputs(OVERLAPS)
    _put_back(logits + row * VOCAB, seen_token_ids, seen_before, seen_begin, seen_end, ENTRIES)
    tl.debug_barrier()
    _put_back(logits + row * VOCAB, bias_token_ids, bias_before, bias_begin, bias_end, ENTRIES)


@triton.jit
def _put_back(of_row, token_ids, before, begin, end, ENTRIES: tl.constexpr):
    for first in range(begin, end, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        inside = entry < end
        token = tl.load(token_ids + entry, mask=inside, other=0)
        tl.store(of_row + token, tl.load(before + entry, mask=inside, other=0.0), mask=inside)
