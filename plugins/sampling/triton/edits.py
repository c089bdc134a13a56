"""Applies biases and penalties to the logits in place, and keeps the logits from before."""

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
    pending,
    sampled,
    dims,
    bias_before,
    seen_before,
    pending_token,
    pending_before,
    VOCAB: tl.constexpr,
    ENTRIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program a row, ENTRIES entries at once: first all biases, then all penalties.

    `sampled` is what the step before drew: of it, `pending` names the token that penalties count
    beside the entries.
    """
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
    source = tl.load(pending + row, mask=is_real, other=-1)
    wait_for_inputs(OVERLAPS)
    of_row = logits + row * VOCAB
    last = tl.load(sampled + source, mask=source >= 0, other=-1)
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
    num_found = tl.full([], 0, tl.int32)
    for begin in range(seen_begin, seen_end, ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)
        inside = entry < seen_end
        token = tl.load(seen_token_ids + entry, mask=inside, other=0)
        is_last = inside & (token == last)
        num_found += tl.sum(is_last.to(tl.int32))
        count = tl.load(seen_counts + entry, mask=inside, other=0) + is_last.to(tl.int32)
        value = tl.load(of_row + token, mask=inside, other=0.0)
        tl.store(seen_before + entry, value, mask=inside)
        penalised = _penalised(value, count, repetition, presence, frequency)
        tl.store(of_row + token, penalised, mask=inside)
    if source >= 0:
        is_new = num_found == 0
        value = tl.load(of_row + last)
        tl.store(pending_token + row, tl.where(is_new, last, -1))
        tl.store(pending_before + row, value)
        penalised = _penalised(value, 1, repetition, presence, frequency)
        tl.store(of_row + last, penalised, mask=is_new)


@triton.jit
def _penalised(value, count, repetition, presence, frequency):
    """Logits of tokens that occur `count` times in the output."""
    scaled = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    # A tiny or huge penalty must not make a finite logit infinite, which is an invalid row.
    is_finite = (value > float("-inf")) & (value < float("inf"))
    scaled = tl.where(is_finite, tl.clamp(scaled, -3.4e38, 3.4e38), scaled)
    scaled -= tl.where(count > 0, presence, 0.0)
    scaled -= frequency * count
    return scaled


@triton.jit
def before_edit(
    value,
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
    ENTRIES: tl.constexpr,
):
    """The logit of a row's token before `edit`, whose `value` it is now; of a row that was not
    edited, `value`."""
    # What was changed first was saved first.
    seen, is_seen = _saved(row, token, seen_start, seen_token_ids, seen_before, ENTRIES)
    biased, is_biased = _saved(row, token, bias_start, bias_token_ids, bias_before, ENTRIES)
    has_pending = tl.load(pending + row) >= 0
    is_pending = tl.load(pending_token + row, mask=has_pending, other=-1) == token
    of_pending = tl.load(pending_before + row, mask=is_pending, other=0.0)
    value = tl.where(is_pending, of_pending, value)
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
