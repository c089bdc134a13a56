"""Biases and penalties, applied to the logits in place, and what the logits were before."""

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
def before_edit(
    value,
    token,
    row,
    bias_start,
    bias_token_ids,
    seen_start,
    seen_token_ids,
    bias_before,
    seen_before,
    ENTRIES: tl.constexpr,
):
    """The logit of a row's token before `edit`, whose `value` it is now; of a row that was not
    edited, `value`."""
    # What was changed first was saved first.
    seen, is_seen = _saved(row, token, seen_start, seen_token_ids, seen_before, ENTRIES)
    biased, is_biased = _saved(row, token, bias_start, bias_token_ids, bias_before, ENTRIES)
    return tl.where(is_biased, biased, tl.where(is_seen, seen, value))


@triton.jit
def _saved(row, token, starts, token_ids, before, ENTRIES: tl.constexpr):
    """What a sparse list saved of a row's token, and whether it has the token."""
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    place = tl.full([], -1, tl.int32)
    for first in range(begin, end, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        found = tl.load(token_ids + entry, mask=entry < end, other=-1) == token
        place = tl.maximum(place, tl.max(tl.where(found, entry, -1)))
    return tl.load(before + place, mask=place >= 0, other=0.0), place >= 0
