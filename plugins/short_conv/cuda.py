"""short_conv for GPUs: tiles of some rows of a sequence and some channels.

decode    read the state, add the one new token, write the state
any       keep each sequence's state aside, since a tile may write where another reads it; then
          all tiles

A draft is a sequence that goes on from what the row before it leaves in the same step. No program
waits for another: a state is no more than the last inputs, and those of this step are in `gated`.
"""

import triton
import triton.language as tl

from trtc.plugins.attention.triton import find_sequence
from trtc.plugins.gpu.lowering import ONE, Extent, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.protos.dtypes import DTYPES

_BLOCK = 256
"""Channels of a program."""
_ROWS = 8
"""Of a tile."""
_NUM_WARPS = 4


@triton.jit
def find_state(
    sequence,
    row,
    start,
    page_table,
    slots,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """The page with the state that a sequence goes on from, and how many rows before its first one,
    at most COLUMNS, this step has added since: those of the sequences of one token, each of which
    goes on from what the row before it leaves."""
    table = page_table + sequence.to(tl.int64) * TABLE_WIDTH
    page = tl.load(table + tl.maximum(start - 1, 0) // PAGE_SIZE)
    behind = 0
    for back in tl.static_range(COLUMNS):
        is_there = sequence > back
        left = tl.load(slots + row - back - 1, mask=is_there, other=-PAGE_SIZE) // PAGE_SIZE
        older = table - (back + 1) * TABLE_WIDTH + tl.maximum(start - back - 2, 0) // PAGE_SIZE
        older_page = tl.load(older, mask=is_there, other=0)
        follows = (behind == back) & (start > back) & (left == page)
        page = tl.where(follows, older_page, page)
        behind += follows.to(tl.int32)
    return page.to(tl.int64), behind


@triton.jit
def input_before(
    distance: tl.constexpr,
    gated,
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
    GATED_STRIDE: tl.constexpr,
):
    """The convolution's input `distance` tokens before a row: an input of this step, or a column of
    the state; zeros before the sequence's start."""
    is_new = distance <= behind
    b = gated + (row - distance) * GATED_STRIDE + channel
    left = tl.load(b, mask=inside & is_new, other=0.0).to(tl.float32)
    right = tl.load(b + 2 * CHANNELS, mask=inside & is_new, other=0.0).to(tl.float32)
    column = state_out + page * STATE_STRIDE + (COLUMNS - distance + behind) * CHANNELS + channel
    is_kept = (distance > behind) & (start > behind)
    older = tl.load(column, mask=inside & is_kept, other=0.0)
    return tl.where(is_new, (left * right).to(gated.dtype.element_ty), older)


@triton.jit
def keep_state(
    gated,
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
    GATED_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """kept [B, COLUMNS, CHANNELS]: what each sequence goes on from; zeros at its start."""
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
                gated,
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
                GATED_STRIDE,
            )
            target = kept + (sequence * COLUMNS + column) * CHANNELS + channel
            tl.store(target, values, mask=inside)


@triton.jit
def short_conv(
    gated,
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
    GATED_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    THROUGH: tl.constexpr = gated.dtype.element_ty
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
            b = gated + (row + tap - COLUMNS)[:, None] * GATED_STRIDE + channel[None, :]
            is_here = inside & (source >= 0)[:, None]
            left = tl.load(b, mask=is_here, other=0.0).to(tl.float32)
            right = tl.load(b + 2 * CHANNELS, mask=is_here, other=0.0).to(tl.float32)
            values = (left * right).to(THROUGH)
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
        c = gated + row[:, None] * GATED_STRIDE + CHANNELS + channel[None, :]
        by_row = tl.load(c, mask=inside, other=0.0).to(tl.float32)
        result = by_row * total.to(THROUGH).to(tl.float32)
        place = out + row[:, None] * OUT_STRIDE + channel[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def short_conv_decode(
    gated,
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
    GATED_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of sequences with one new token each: row and sequence are one. Nobody else writes the page
    that a sequence writes, and nobody else reads it, unless rows that go on from it take their
    inputs of this step from `gated`."""
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    THROUGH: tl.constexpr = gated.dtype.element_ty
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
        b = gated + row * GATED_STRIDE + channel
        left = tl.load(b, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(b + 2 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
        now = (left * right).to(THROUGH)
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(COLUMNS + 1):
            values = now
            if tap < COLUMNS:
                values = input_before(
                    COLUMNS - tap,
                    gated,
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
                    GATED_STRIDE,
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
        by_row = tl.load(b + CHANNELS, mask=inside, other=0.0).to(tl.float32)
        result = by_row * total.to(THROUGH).to(tl.float32)
        tl.store(out + row * OUT_STRIDE + channel, result.to(out.dtype.element_ty), mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    channels, columns = site.axes["channels"], site.axes["columns"]
    block = min(_BLOCK, power_of_two(channels))
    parts = -(-channels // block)
    shared = {
        "CHANNELS": channels,
        "COLUMNS": columns,
        "PAGE_SIZE": site.page_size,
        "STATE_STRIDE": site.strides["state_out"],
        "GATED_STRIDE": site.strides["gated"],
        "BLOCK": block,
    }
    reading = {**shared, "TABLE_WIDTH": site.table_width}
    writing = {"OUT_STRIDE": site.strides["out"]}
    by_sequence = (Extent("sequences", times=parts), ONE, ONE)
    tiles = (Extent("tokens", block=_ROWS, times=parts, plus="sequences"), ONE, ONE)
    dtype = site.dtypes["state_out"]
    kept = {"kept": dtype}
    most = site.limits.max_num_tokens
    decode = scratch_launch(
        site,
        short_conv_decode,
        {**reading, **writing},
        by_sequence,
        num_warps=_NUM_WARPS,
        scratch={},
    )
    pair = (
        scratch_launch(site, keep_state, reading, by_sequence, num_warps=_NUM_WARPS, scratch=kept),
        scratch_launch(
            site,
            short_conv,
            {**shared, **writing, "ROWS": _ROWS},
            tiles,
            num_warps=_NUM_WARPS,
            scratch=kept,
        ),
    )
    kept_bytes = DTYPES[dtype].num_bytes(site.limits.max_batch_size * columns * channels)
    return (
        Variant(work=(decode,), max_rows=most, kind="decode"),
        Variant(work=pair, max_rows=most, scratch={"kept": kept_bytes}),
    )
