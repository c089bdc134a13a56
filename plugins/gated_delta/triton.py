"""The gated delta rule for GPUs, a row at a time: a program keeps some columns of a head's state.

Columns of a state do not depend on each other, so no program waits for another. The program of a
sequence goes on with the sequences behind it that are its drafts: one token each, which goes on
from what the row before it leaves.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import find_state, launch_dependents, wait_for_inputs


@triton.jit
def unit_vector(place, index, inside, scale):
    """A row's values times scale / their length."""
    values = tl.load(place + index, mask=inside, other=0.0).to(tl.float32)
    return values * (scale / tl.sqrt(tl.sum(values * values, axis=0) + 1e-6))


@triton.jit
def head_gates(a, b, rate, dt_bias, row, head, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr):
    """Of a row: the factor of what a head remembers, and of what it writes."""
    x = tl.load(a + row * A_STRIDE + head).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    beta = tl.sigmoid(tl.load(b + row * B_STRIDE + head).to(tl.float32))
    return tl.exp(tl.load(rate + head) * softplus), beta


@triton.jit
def find_rows(
    sequence,
    query_start,
    context_lens,
    page_table,
    slots,
    num_sequences,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """The rows of a sequence and of the drafts behind it, and the page with the state that they go
    on from: -1 if they are a sequence's first tokens. No rows for a sequence that is a draft."""
    first, last = 0, 0
    old = tl.full([], -1, tl.int64)
    if sequence < num_sequences:
        first = tl.load(query_start + sequence)
        last = tl.load(query_start + sequence + 1)
        start = tl.load(context_lens + sequence) - (last - first)
        page, behind = find_state(
            sequence, first, start, page_table, slots, 1, PAGE_SIZE, TABLE_WIDTH
        )
        old = tl.where(start > 0, page, old)
        last = tl.where(behind > 0, first, last)
        goes_on = (behind == 0) & (sequence + 1 < num_sequences)
        while goes_on:
            sequence += 1
            end = tl.load(query_start + sequence + 1)
            start = tl.load(context_lens + sequence) - (end - last)
            page, behind = find_state(
                sequence, last, start, page_table, slots, 1, PAGE_SIZE, TABLE_WIDTH
            )
            last = tl.where(behind > 0, end, last)
            goes_on = (behind > 0) & (sequence + 1 < num_sequences)
    return first, last, old


@triton.jit
def delta_rows(
    qkv,
    b,
    a,
    query_start,
    context_lens,
    page_table,
    slots,
    rate,
    dt_bias,
    dims,
    found,
    state_out,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """found [T, VALUE_HEADS * VALUE_DIM], before the norm."""
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sequence = tl.program_id(0) // (VALUE_HEADS * PARTS)
    head = tl.program_id(0) // PARTS % VALUE_HEADS
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = key < KEY_DIM, column < VALUE_DIM
    inside = is_key[:, None] & is_column[None, :]
    of_head = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
    first, last, old = find_rows(
        sequence,
        query_start,
        context_lens,
        page_table,
        slots,
        tl.load(dims + 1),
        PAGE_SIZE,
        TABLE_WIDTH,
    )
    kept = state_out + tl.maximum(old, 0) * STATE_STRIDE + of_head
    state = tl.load(kept, mask=inside & (old >= 0), other=0.0)
    # Threads that hold the same values read them before any of them writes.
    tl.debug_barrier()
    for row in range(first, last):
        at = tl.cast(row, tl.int64)
        of_row = qkv + at * QKV_STRIDE
        q = unit_vector(of_row + key_head * KEY_DIM, key, is_key, KEY_DIM**-0.5)
        k = unit_vector(of_row + (KEY_HEADS + key_head) * KEY_DIM, key, is_key, 1.0)
        of_values = of_row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        v = tl.load(of_values + column, mask=is_column, other=0.0).to(tl.float32)
        decay, beta = head_gates(a, b, rate, dt_bias, at, head, A_STRIDE, B_STRIDE)
        state *= decay
        new = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * new[None, :]
        result = tl.sum(state * q[:, None], axis=0)
        target = found + (at * VALUE_HEADS + head) * VALUE_DIM
        tl.store(target + column, result, mask=is_column)
        page = tl.load(slots + row) // PAGE_SIZE
        next_page = tl.load(slots + row + 1, mask=row + 1 < last, other=-PAGE_SIZE) // PAGE_SIZE
        if next_page != page:
            tl.store(state_out + page.to(tl.int64) * STATE_STRIDE + of_head, state, mask=inside)


@triton.jit
def gated_norm(
    z,
    norm,
    dims,
    found,
    out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = rms_norm(found) * norm * silu(z), a head of a row each."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if row < tl.load(dims):
        values = tl.load(found + (row * HEADS + head) * WIDTH + column, mask=inside, other=0.0)
        by = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + EPS)
        weight = tl.load(norm + column, mask=inside, other=0.0)
        gate = tl.load(z + row * Z_STRIDE + head * WIDTH + column, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        result = values * by * weight * (gate / (1.0 + tl.exp(-gate)))
        place = out + row * OUT_STRIDE + head * WIDTH + column
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)
