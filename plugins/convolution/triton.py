"""Causal, depthwise convolutions for GPUs: tiles of some rows of a sequence and some channels.

decode    read the state, add the one new token, write the state
any       keep each sequence's state aside, since a tile may write where another reads it; then
          all tiles

A draft is a sequence of one token, whose state is the one after the row before it, of the same
step. Programs are independent of each other: a state holds the last inputs only, and those of this
step are in `inputs`.

    GATED     b, c, x = split(inputs); out = c * (conv(b * x) + bias)
    else      out = silu(conv(inputs) + bias)
"""

import triton
import triton.language as tl

from trtc.plugins.attention.triton import find_sequence
from trtc.plugins.gpu.triton import find_state, launch_dependents, wait_for_inputs


@triton.jit
def input_at(place, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """Inputs of the convolution, rounded to the state's element type."""
    values = tl.load(place, mask=mask, other=0.0)
    if GATED:
        by = tl.load(place + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) * by).to(place.dtype.element_ty)
    return values


@triton.jit
def output_of(total, place, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """The operator's output for the convolution's result; `place`: address of its input."""
    if GATED:
        by = tl.load(place + CHANNELS, mask=mask, other=0.0).to(tl.float32)
        result = by * total.to(place.dtype.element_ty).to(tl.float32)
    else:
        result = total / (1.0 + tl.exp(-total))
    return result


@triton.jit
def input_before(
    distance: tl.constexpr,
    inputs,
    state_out,
    row,
    start,
    page,
    behind,
    channel,
    inside,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
):
    """The convolution's input `distance` tokens before a row: an input of this step, or a column of
    the state; zeros before the sequence's start."""
    is_new = distance <= behind
    place = inputs + (row - distance) * INPUT_STRIDE + channel
    newer = input_at(place, inside & is_new, CHANNELS, GATED)
    column = state_out + page * STATE_STRIDE + (COLUMNS - distance + behind) * CHANNELS + channel
    is_kept = (distance > behind) & (start > behind)
    older = tl.load(column, mask=inside & is_kept, other=0.0)
    return tl.where(is_new, newer, older)


@triton.jit
def keep_state(
    inputs,
    query_start,
    context_lens,
    page_table,
    slots,
    dims,
    kept,
    state_out,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """kept [B, COLUMNS, CHANNELS]: each sequence's state before the step; zeros at its start."""
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sequence = tl.program_id(0) // PARTS
    channel = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    if sequence < tl.load(dims + 1):
        row = tl.load(query_start + sequence)
        start = tl.load(context_lens + sequence) - (tl.load(query_start + sequence + 1) - row)
        page, behind = find_state(
            sequence, row, start, page_table, slots, COLUMNS, PAGE_SIZE, TABLE_WIDTH
        )
        inside = channel < CHANNELS
        for column in tl.static_range(COLUMNS):
            values = input_before(
                COLUMNS - column,
                inputs,
                state_out,
                row.to(tl.int64),
                start,
                page,
                behind,
                channel,
                inside,
                CHANNELS,
                COLUMNS,
                STATE_STRIDE,
                INPUT_STRIDE,
                GATED,
            )
            target = kept + (sequence * COLUMNS + column) * CHANNELS + channel
            tl.store(target, values, mask=inside)


@triton.jit
def convolution(
    inputs,
    query_start,
    slots,
    weight,
    bias,
    dims,
    kept,
    out,
    state_out,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    tile = tl.program_id(0) // PARTS
    channel = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    sequence, first_new = find_sequence(tile, query_start, tl.load(dims + 1), ROWS)
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    if first_new < num_new:
        new = first_new + tl.arange(0, ROWS)
        is_channel = channel < CHANNELS
        inside = (new < num_new)[:, None] & is_channel[None, :]
        row = (first_row + new).to(tl.int64)
        page = tl.load(slots + row, mask=new < num_new, other=0) // PAGE_SIZE
        next_page = tl.load(slots + row + 1, mask=new + 1 < num_new, other=-PAGE_SIZE) // PAGE_SIZE
        leaves = (new < num_new) & (next_page != page)
        page = page.to(tl.int64)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for tap in tl.static_range(COLUMNS + 1):
            # Inputs of this step, and before those the state's columns.
            source = new + tap - COLUMNS
            place = inputs + (row + tap - COLUMNS)[:, None] * INPUT_STRIDE + channel[None, :]
            values = input_at(place, inside & (source >= 0)[:, None], CHANNELS, GATED)
            if tap < COLUMNS:
                column = kept + (sequence * COLUMNS + new + tap)[:, None] * CHANNELS
                is_kept = inside & (source < 0)[:, None]
                older = tl.load(column + channel[None, :], mask=is_kept, other=0.0)
                values = tl.where(is_kept, older, values)
            by = tl.load(weight + tap * CHANNELS + channel, mask=is_channel, other=0.0)
            total += values.to(tl.float32) * by[None, :]
            if tap > 0:
                target = state_out + page[:, None] * STATE_STRIDE + (tap - 1) * CHANNELS
                tl.store(target + channel[None, :], values, mask=leaves[:, None] & inside)
        if bias is not None:
            total += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
        given = inputs + row[:, None] * INPUT_STRIDE + channel[None, :]
        result = output_of(total, given, inside, CHANNELS, GATED)
        place = out + row[:, None] * OUT_STRIDE + channel[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolution_decode(
    inputs,
    context_lens,
    page_table,
    slots,
    weight,
    bias,
    dims,
    out,
    state_out,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """For sequences with one new token each, so that row r is sequence r. No other program writes a
    sequence's page of this step. None reads it: drafts after it take inputs of this step from
    `inputs`."""
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    channel = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(dims + 1):
        inside = channel < CHANNELS
        start = tl.load(context_lens + row) - 1
        old, behind = find_state(
            row, row, start, page_table, slots, COLUMNS, PAGE_SIZE, TABLE_WIDTH
        )
        page = (tl.load(slots + row) // PAGE_SIZE).to(tl.int64)
        given = inputs + row * INPUT_STRIDE + channel
        now = input_at(given, inside, CHANNELS, GATED)
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(COLUMNS + 1):
            values = now
            if tap < COLUMNS:
                values = input_before(
                    COLUMNS - tap,
                    inputs,
                    state_out,
                    row,
                    start,
                    old,
                    behind,
                    channel,
                    inside,
                    CHANNELS,
                    COLUMNS,
                    STATE_STRIDE,
                    INPUT_STRIDE,
                    GATED,
                )
            # Threads that hold the same channel read a column before any of them writes it.
            tl.debug_barrier()
            by = tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0)
            total += values.to(tl.float32) * by
            if tap > 0:
                target = state_out + page * STATE_STRIDE + (tap - 1) * CHANNELS + channel
                tl.store(target, values, mask=inside)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        result = output_of(total, given, inside, CHANNELS, GATED)
        tl.store(out + row * OUT_STRIDE + channel, result.to(out.dtype.element_ty), mask=inside)
