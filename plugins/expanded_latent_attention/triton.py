"""Expanding latents to the keys and values of every head, and attention to them, in Triton.

The buffers are [heads, ROOM, head_dim] and [heads, ROOM, value_dim]: a head's keys follow each
other, and programs that run at the same time read those of few heads.
"""

import triton
import triton.language as tl

from trtc.plugins.attention.triton import find_sequence
from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.latents.triton import expansion, place_of


@triton.jit
def expand_latents(
    pool,
    weight,
    query_start,
    context_lens,
    page_table,
    dims,
    wide,
    counter,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    N: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    LEAST_NEW: tl.constexpr,
    ROOM: tl.constexpr,
    MOST_CONTEXT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """wide[head] = (latents[:RANK] @ weight[head], latents[RANK:][:REST]).

    Programs share the tiles, of which a step may have none. BLOCK_M divides ALIGNMENT, and behind a
    sequence's last token, up to a multiple of it, are zeros.

    Args:
        weight: [heads, RANK, N], or [heads, N, RANK] if TRANSPOSED.
        counter: None, or what becomes 0.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = NUM_HEADS * BLOCKS
    launch_dependents(OVERLAPS)
    taken, ends = expansion(
        query_start,
        context_lens,
        tl.load(dims + 1),
        LEAST_NEW,
        ROOM,
        MOST_CONTEXT,
        ALIGNMENT,
        SEQUENCES,
    )
    tiles = tl.max(tl.where(ends <= ROOM, ends, 0), 0) // BLOCK_M
    wait_for_inputs(OVERLAPS)
    if counter is not None:
        tl.store(counter, 0, mask=tl.program_id(0) == 0)
    for work in range(tl.program_id(0), tiles * PARTS, tl.num_programs(0)):
        first = work // PARTS * BLOCK_M
        head = work % PARTS // BLOCKS
        block = work % BLOCKS
        sequence = tl.sum((ends <= first).to(tl.int32), 0)
        token = first - place_of(sequence, taken, ends, ROOM) + tl.arange(0, BLOCK_M)
        is_row = token < tl.load(context_lens + sequence)
        pages = page_table + tl.cast(sequence, tl.int64) * TABLE_WIDTH
        page = tl.load(pages + token // PAGE_SIZE, mask=is_row, other=0).to(tl.int64)
        source = pool + (page * PAGE_SIZE + token % PAGE_SIZE) * (RANK + ROPE)
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        matrix = weight + tl.cast(head, tl.int64) * (RANK * N)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, RANK, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            a = tl.load(
                source[:, None] + k[None, :], mask=is_row[:, None] & (k < RANK)[None, :], other=0.0
            ).to(weight.dtype.element_ty)
            at = n[None, :] * RANK + k[:, None] if TRANSPOSED else k[:, None] * N + n[None, :]
            b = tl.load(matrix + at, mask=(n < N)[None, :] & (k < RANK)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        row = tl.cast(head, tl.int64) * ROOM + first + tl.arange(0, BLOCK_M)
        target = wide + row * (N + REST)
        inside = (n < N)[None, :]
        tl.store(target[:, None] + n[None, :], total.to(wide.dtype.element_ty), mask=inside)
        if (REST > 0) & (block == 0):
            column = tl.arange(0, REST_PAD)
            is_rest = (column < REST)[None, :]
            rest = tl.load(
                source[:, None] + RANK + column[None, :], mask=is_row[:, None] & is_rest, other=0.0
            )
            tl.store(
                target[:, None] + N + column[None, :], rest.to(wide.dtype.element_ty), mask=is_rest
            )


@triton.jit
def expanded_prefill(
    q,
    wide_keys,
    wide_values,
    query_start,
    context_lens,
    dims,
    out,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    LEAST_NEW: tl.constexpr,
    ROOM: tl.constexpr,
    MOST_CONTEXT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A tile of a sequence's new tokens, of one head. WIDE, a power of two, and REST_PAD channels,
    if any, make up a head of q and k."""
    launch_dependents(OVERLAPS)
    num_sequences = tl.load(dims + 1)
    # The last tiles have the most keys before them: they come first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence, first_new = find_sequence(tile, query_start, num_sequences, BLOCK_M)
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    taken, ends = expansion(
        query_start,
        context_lens,
        num_sequences,
        LEAST_NEW,
        ROOM,
        MOST_CONTEXT,
        ALIGNMENT,
        SEQUENCES,
    )
    place = place_of(sequence, taken, ends, ROOM)
    wait_for_inputs(OVERLAPS)
    if (place >= 0) & (first_new < num_new):
        new = first_new + tl.arange(0, BLOCK_M)
        is_row = new < num_new
        row = (first_row + new).to(tl.int64)
        before = tl.load(context_lens + sequence) - num_new
        position = before + new
        source = q + row * Q_STRIDE + head * HEAD_DIM
        wide = tl.arange(0, WIDE)
        at_rest = WIDE + tl.arange(0, REST_PAD)
        is_rest = at_rest < HEAD_DIM
        queries = tl.load(source[:, None] + wide[None, :], mask=is_row[:, None], other=0.0)
        rest = None if WIDE == HEAD_DIM else tl.load(
            source[:, None] + at_rest[None, :], mask=is_row[:, None] & is_rest[None, :], other=0.0
        )  # fmt: skip
        column = tl.arange(0, VALUE_PAD)
        is_column = (column < VALUE_DIM)[None, :]
        base = tl.cast(head, tl.int64) * ROOM + place
        keys_of_head = wide_keys + base * HEAD_DIM
        values_of_head = wide_values + base * VALUE_DIM
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
        end = before + tl.minimum(first_new + BLOCK_M, num_new)
        # Keys before `seen_by_all` need no mask.
        seen_by_all = (before + first_new + 1) // BLOCK_N * BLOCK_N
        largest, total, weighted = _attend_blocks(
            largest, total, weighted, queries, rest, position, 0, seen_by_all, keys_of_head,
            values_of_head, HEAD_DIM, WIDE, REST_PAD, VALUE_DIM, VALUE_PAD, BLOCK_N, SCALE,
            MASKED=False,
        )  # fmt: skip
        largest, total, weighted = _attend_blocks(
            largest, total, weighted, queries, rest, position, seen_by_all, end, keys_of_head,
            values_of_head, HEAD_DIM, WIDE, REST_PAD, VALUE_DIM, VALUE_PAD, BLOCK_N, SCALE,
            MASKED=True,
        )  # fmt: skip
        target = out + (row * OUT_STRIDE + head * VALUE_DIM)[:, None] + column[None, :]
        result = weighted / total[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column)


@triton.jit
def _attend_blocks(
    largest,
    total,
    weighted,
    queries,
    rest,
    position,
    begin,
    end,
    keys,
    values,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax after keys [begin, end), of a head's `keys` and `values`. Without MASKED
    they are whole blocks, which every row sees. `rest`: the queries' channels behind WIDE, or
    None."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    wide = tl.arange(0, WIDE)
    at_rest = WIDE + tl.arange(0, REST_PAD)
    is_rest = (at_rest < HEAD_DIM)[:, None]
    column = tl.arange(0, VALUE_PAD)
    is_column = (column < VALUE_DIM)[None, :]
    for block in range(begin, end, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        k_at = keys + key * HEAD_DIM
        v_at = (values + key * VALUE_DIM)[:, None] + column[None, :]
        if MASKED:
            live = key < end
            k = tl.load(k_at[None, :] + wide[:, None], mask=live[None, :], other=0.0)
            v = tl.load(v_at, mask=live[:, None] & is_column, other=0.0)
        else:
            k = tl.load(k_at[None, :] + wide[:, None])
            v = tl.load(v_at, mask=is_column, other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee")
        if rest is not None:
            inside = is_rest & live[None, :] if MASKED else is_rest
            k_rest = tl.load(k_at[None, :] + at_rest[:, None], mask=inside, other=0.0)
            scores = tl.dot(rest, k_rest, scores, input_precision="ieee")
        scores = scores * (SCALE * LOG2_E)
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision="ieee")
        largest = new_largest
    return largest, total, weighted
