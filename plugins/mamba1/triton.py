"""The selective scan of Mamba for GPUs: a program keeps the states of some channels of a sequence.

Every channel and element of its state forgets at a rate of its own, so that rows are no product of
matrices: they go one at a time, in prompts as in decodes. The program of a sequence goes on with
the sequences behind it that are its drafts: one token each, which goes on from what the row before
it leaves.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import (
    find_rows,
    launch_dependents,
    page_left,
    softplus,
    state_before,
    wait_for_inputs,
)


@triton.jit
def scan_rows(
    x,
    z,
    dt,
    b,
    c,
    query_start,
    context_lens,
    page_table,
    slots,
    rate,
    dt_bias,
    skip,
    dims,
    out,
    state_out,
    CHANNELS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    sequence = tl.program_id(0) // PARTS
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = key < STATE_SIZE, column < CHANNELS
    inside = is_key[:, None] & is_column[None, :]
    place = key[:, None] * CHANNELS + column[None, :]
    of_rate = tl.load(rate + place, mask=inside, other=0.0)
    bias = tl.load(dt_bias + column, mask=is_column, other=0.0)
    skipped = tl.load(skip + column, mask=is_column, other=0.0)
    wait_for_inputs(OVERLAPS)
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
    state = state_before(state_out, old, place, inside, STATE_STRIDE)
    for row in range(first, last):
        at = tl.cast(row, tl.int64)
        values = tl.load(x + at * X_STRIDE + column, mask=is_column, other=0.0).to(tl.float32)
        time = tl.load(dt + at * DT_STRIDE + column, mask=is_column, other=0.0).to(tl.float32)
        gate = tl.load(z + at * Z_STRIDE + column, mask=is_column, other=0.0).to(tl.float32)
        written = tl.load(b + at * B_STRIDE + key, mask=is_key, other=0.0).to(tl.float32)
        read = tl.load(c + at * C_STRIDE + key, mask=is_key, other=0.0).to(tl.float32)
        time += bias
        step = softplus(time)
        state = (
            state * tl.exp(of_rate * step[None, :]) + written[:, None] * (step * values)[None, :]
        )
        result = tl.sum(state * read[:, None], axis=0) + skipped * values
        result *= gate / (1.0 + tl.exp(-gate))
        target = out + at * OUT_STRIDE + column
        tl.store(target, result.to(out.dtype.element_ty), mask=is_column)
        page, is_left = page_left(row, last, slots, PAGE_SIZE)
        tl.store(state_out + page * STATE_STRIDE + place, state, mask=inside & is_left)
