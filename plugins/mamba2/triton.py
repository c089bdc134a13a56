"""The recurrence of Mamba-2 for GPUs: a program keeps some columns of a head's state.

ssm_rows        a row at a time, for steps of one token a sequence
ssm_chunks      rows of up to CHUNK neighbouring positions at a time, by products of matrices

Columns of a state do not depend on each other, so no program waits for another. The program of a
sequence goes on with the sequences behind it that are its drafts: one token each, which goes on
from what the row before it leaves.

A chunk of the recurrence (Dao and Gu 2024, arXiv:2405.21060, section 6) from a state S, with G the
sum of rate * dt up to a row, D[i, j] = exp(G[i] - G[j]) for i >= j, else 0, and X the rows dt * x:

    result = ((C @ B.T) * D) @ X + exp(G) * (C @ S)
    S = exp(G[-1]) * S + (exp(G[-1] - G) * B).T @ X
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import (
    find_rows,
    first_single,
    launch_dependents,
    page_left,
    softplus,
    state_before,
    wait_for_inputs,
)


@triton.jit
def time_step(
    dt,
    dt_bias,
    row,
    is_row,
    head,
    DT_STRIDE: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
):
    """softplus(dt + dt_bias) of rows, within the limits; DT_MAX 0 is none."""
    x = tl.load(dt + row * DT_STRIDE + head, mask=is_row, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head)
    step = softplus(x)
    step = tl.maximum(step, DT_MIN)
    if DT_MAX > 0:
        step = tl.minimum(step, DT_MAX)
    return step


@triton.jit
def add_row(
    state,
    row,
    last,
    head,
    key,
    column,
    xbc,
    dt,
    slots,
    rate,
    dt_bias,
    skip,
    found,
    state_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    XBC_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
):
    """The state after a row, which is stored where the next row leaves its own elsewhere."""
    is_key, is_column = key < STATE_SIZE, column < HEAD_DIM
    at = tl.cast(row, tl.int64)
    of_row = xbc + at * XBC_STRIDE
    of_group = of_row + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE
    b = tl.load(of_group + key, mask=is_key, other=0.0).to(tl.float32)
    c = tl.load(of_group + GROUPS * STATE_SIZE + key, mask=is_key, other=0.0).to(tl.float32)
    x = tl.load(of_row + head * HEAD_DIM + column, mask=is_column, other=0.0).to(tl.float32)
    step = time_step(dt, dt_bias, at, row < last, head, DT_STRIDE, DT_MIN, DT_MAX)
    state = state * tl.exp(tl.load(rate + head) * step) + b[:, None] * (step * x)[None, :]
    result = tl.sum(state * c[:, None], axis=0) + tl.load(skip + head) * x
    target = found + (at * HEADS + head) * HEAD_DIM
    tl.store(target + column, result, mask=is_column)
    page, is_left = page_left(row, last, slots, PAGE_SIZE)
    of_head = head * (STATE_SIZE * HEAD_DIM) + key[:, None] * HEAD_DIM + column[None, :]
    place = state_out + page * STATE_STRIDE + of_head
    leaves = is_left & is_key[:, None] & is_column[None, :]
    tl.store(place, state, mask=leaves)
    return state


@triton.jit
def ssm_rows(
    xbc,
    dt,
    query_start,
    context_lens,
    page_table,
    slots,
    rate,
    dt_bias,
    skip,
    dims,
    found,
    state_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    XBC_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """found [T, HEADS * HEAD_DIM], before the gate."""
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sequence = tl.program_id(0) // (HEADS * PARTS)
    head = tl.program_id(0) // PARTS % HEADS
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    inside = (key < STATE_SIZE)[:, None] & (column < HEAD_DIM)[None, :]
    of_head = head * (STATE_SIZE * HEAD_DIM) + key[:, None] * HEAD_DIM + column[None, :]
    first, _, last, _, old = find_rows(
        sequence,
        query_start,
        context_lens,
        page_table,
        slots,
        tl.load(dims + 1),
        PAGE_SIZE,
        TABLE_WIDTH,
    )
    state = state_before(state_out, old, of_head, inside, STATE_STRIDE)
    for row in range(first, last):
        state = add_row(
            state,
            row,
            last,
            head,
            key,
            column,
            xbc,
            dt,
            slots,
            rate,
            dt_bias,
            skip,
            found,
            state_out,
            HEADS,
            HEAD_DIM,
            GROUPS,
            STATE_SIZE,
            DT_MIN,
            DT_MAX,
            PAGE_SIZE,
            STATE_STRIDE,
            XBC_STRIDE,
            DT_STRIDE,
        )


@triton.jit
def ssm_chunks(
    xbc,
    dt,
    query_start,
    context_lens,
    page_table,
    slots,
    rate,
    dt_bias,
    skip,
    dims,
    found,
    state_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    XBC_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """found [T, HEADS * HEAD_DIM], before the gate. A chunk has ROWS of CHUNK rows at most, which
    divide PAGE_SIZE, so that none has rows of two pages."""
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sequence = tl.program_id(0) // (HEADS * PARTS)
    head = tl.program_id(0) // PARTS % HEADS
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = key < STATE_SIZE, column < HEAD_DIM
    inside = is_key[:, None] & is_column[None, :]
    of_head = head * (STATE_SIZE * HEAD_DIM) + key[:, None] * HEAD_DIM + column[None, :]
    first, own, last, position, old = find_rows(
        sequence,
        query_start,
        context_lens,
        page_table,
        slots,
        tl.load(dims + 1),
        PAGE_SIZE,
        TABLE_WIDTH,
    )
    state = state_before(state_out, old, of_head, inside, STATE_STRIDE)
    tail = first_single(first, own, slots, PAGE_SIZE)
    index = tl.arange(0, CHUNK)
    is_lower = index[:, None] >= index[None, :]
    rate_of_head = tl.load(rate + head)
    skip_of_head = tl.load(skip + head)
    of_group = xbc + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE
    end_chunk = tl.where(tail > first, tl.cdiv(position + tail - first, ROWS), 0)
    for chunk in range(position // ROWS, end_chunk):
        begin = first + chunk * ROWS - position
        row = begin + index
        is_row = (index < ROWS) & (row >= first) & (row < tail)
        at = row.to(tl.int64)
        keys = of_group + at[:, None] * XBC_STRIDE + key[None, :]
        of_keys = is_row[:, None] & is_key[None, :]
        b = tl.load(keys, mask=of_keys, other=0.0)
        c = tl.load(keys + GROUPS * STATE_SIZE, mask=of_keys, other=0.0)
        is_value = is_row[:, None] & is_column[None, :]
        values = xbc + at[:, None] * XBC_STRIDE + head * HEAD_DIM + column[None, :]
        x = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
        step = time_step(dt, dt_bias, at, is_row, head, DT_STRIDE, DT_MIN, DT_MAX)
        step = tl.where(is_row, step, 0.0)
        log_decay = rate_of_head * step
        sums = tl.cumsum(log_decay, axis=0)
        total = tl.sum(log_decay, axis=0)
        between = tl.where(is_lower, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)
        # Products of what activations hold are exact; of the others the precision is chosen.
        seen = tl.dot(c, tl.trans(b), input_precision=PRECISION) * between
        added = step[:, None] * x
        result = tl.dot(c.to(tl.float32), state, input_precision=PRECISION)
        result = result * tl.exp(sums)[:, None] + skip_of_head * x
        result += tl.dot(seen, added, input_precision=PRECISION)
        target = found + (at * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, result, mask=is_value)
        written = b.to(tl.float32) * tl.exp(total - sums)[:, None]
        state = state * tl.exp(total)
        state += tl.dot(tl.trans(written), added, input_precision=PRECISION)
        end = tl.minimum(begin + ROWS, tail)
        page, is_left = page_left(tl.maximum(end - 1, first), last, slots, PAGE_SIZE)
        place = state_out + page * STATE_STRIDE + of_head
        tl.store(place, state, mask=inside & is_left)
    for row in range(tail, last):
        state = add_row(
            state,
            row,
            last,
            head,
            key,
            column,
            xbc,
            dt,
            slots,
            rate,
            dt_bias,
            skip,
            found,
            state_out,
            HEADS,
            HEAD_DIM,
            GROUPS,
            STATE_SIZE,
            DT_MIN,
            DT_MAX,
            PAGE_SIZE,
            STATE_STRIDE,
            XBC_STRIDE,
            DT_STRIDE,
        )


@triton.jit
def gated_norm(
    z,
    norm,
    dims,
    found,
    out,
    squares,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = rms_norm(found * silu(z)) * norm, a group of a row each, which has WIDTH values;
    without norm, what would be normalised, and the sum of its squares."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if row < tl.load(dims):
        values = tl.load(found + (row * GROUPS + group) * WIDTH + column, mask=inside, other=0.0)
        gate = tl.load(z + row * Z_STRIDE + group * WIDTH + column, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        values *= gate / (1.0 + tl.exp(-gate))
        total = tl.sum(values * values, axis=0)
        if norm is None:
            tl.store(squares + row * SQUARES_STRIDE + group, total)
        else:
            by = 1.0 / tl.sqrt(total / WIDTH + EPS)
            weight = tl.load(norm + group * WIDTH + column, mask=inside, other=0.0)
            values = values * by * weight
        place = out + row * OUT_STRIDE + group * WIDTH + column
        tl.store(place, values.to(out.dtype.element_ty), mask=inside)
