"""The gated delta rule for GPUs: a program keeps some columns of a head's state.

delta_rows      a row at a time, for steps of one token a sequence
delta_pairs     what does not depend on the state, of up to CHUNK neighbouring positions: all chunks
                at once
delta_chunks    with that, so many positions at a time, by products of matrices: one chunk after
                the other, so that it has as little to compute as can be

Columns of a state do not depend on each other, so no program waits for another. The program of a
sequence goes on with the sequences behind it that are its drafts: one token each, which goes on
from what the row before it leaves.

A chunk of the rule (Yang et al. 2024, arXiv:2412.06464, section 3.3) from a state S, with G the sum
of the logarithms of decays up to a row, D[i, j] = exp(G[i] - G[j]) for i >= j, else 0:

    U = (I + strictly_lower(beta * (K @ K.T) * D))^-1 @ (beta * (V - exp(G) * (K @ S)))
    result = exp(G) * (Q @ S) + ((Q @ K.T) * D) @ U
    S = exp(G[-1]) * S + (exp(G[-1] - G) * K).T @ U

Where each key channel d has a decay of its own (Kimi-Linear, arXiv:2510.26692), G has the columns
of K and Q; exp(G) multiplies those before they multiply S, and

    (K @ K.T) * D    becomes    sum over d of K[i, d] * K[j, d] * exp(G[i, d] - G[j, d])

and (Q @ K.T) * D alike. A product of matrices has exp(-G) as a factor, which overflows where decays
are strong, so these sums are taken column by column.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.triton import (
    find_rows,
    first_single,
    launch_dependents,
    page_left,
    quantized,
    softplus,
    state_before,
    wait_for_inputs,
)

FACTORS = tl.constexpr(8)
"""Numbers of a row in `factors`, five of which are used."""


@triton.jit
def unit_vector(place, index, inside, scale):
    """A row's values times scale / their length."""
    values = tl.load(place + index, mask=inside, other=0.0).to(tl.float32)
    return values * (scale / tl.sqrt(tl.sum(values * values, axis=0) + 1e-6))


@triton.jit
def head_gates(
    a,
    b,
    rate,
    dt_bias,
    row,
    is_row,
    head,
    WRITE_SCALE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
):
    """Of a row: the logarithm of the factor of what a head remembers, and the factor of what it
    writes."""
    x = tl.load(a + row * A_STRIDE + head, mask=is_row, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head)
    step = softplus(x)
    return tl.load(rate + head) * step, writing_gate(b, row, is_row, head, WRITE_SCALE, B_STRIDE)


@triton.jit
def channel_decays(of_rows, inside, key, rate, dt_bias, head, KEY_DIM: tl.constexpr):
    """Of rows of `a`: the logarithm of the factor of what each key channel remembers."""
    channel = head * KEY_DIM + tl.minimum(key, KEY_DIM - 1)
    x = tl.load(of_rows + channel, mask=inside, other=0.0).to(tl.float32)
    return tl.load(rate + head) * softplus(x + tl.load(dt_bias + channel))


@triton.jit
def writing_gate(b, row, is_row, head, WRITE_SCALE: tl.constexpr, B_STRIDE: tl.constexpr):
    """Of a row: the factor of what a head writes."""
    written = tl.load(b + row * B_STRIDE + head, mask=is_row, other=0.0).to(tl.float32)
    return tl.sigmoid(written) * WRITE_SCALE


@triton.jit
def add_row(
    state,
    row,
    last,
    head,
    key,
    column,
    qkv,
    b,
    a,
    slots,
    rate,
    dt_bias,
    found,
    state_out,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    WRITE_SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
):
    """The state after a row, which is stored where the next row leaves its own elsewhere."""
    is_key, is_column = key < KEY_DIM, column < VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    at = tl.cast(row, tl.int64)
    of_row = qkv + at * QKV_STRIDE
    q = unit_vector(of_row + key_head * KEY_DIM, key, is_key, KEY_DIM**-0.5)
    k = unit_vector(of_row + (KEY_HEADS + key_head) * KEY_DIM, key, is_key, 1.0)
    of_values = of_row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    v = tl.load(of_values + column, mask=is_column, other=0.0).to(tl.float32)
    if DECAYS == 1:
        log_decay, beta = head_gates(
            a, b, rate, dt_bias, at, row < last, head, WRITE_SCALE, A_STRIDE, B_STRIDE
        )
        state *= tl.exp(log_decay)
    else:
        of_decays, inside = a + at * A_STRIDE, is_key & (row < last)
        log_decay = channel_decays(of_decays, inside, key, rate, dt_bias, head, KEY_DIM)
        beta = writing_gate(b, at, row < last, head, WRITE_SCALE, B_STRIDE)
        state *= tl.exp(log_decay)[:, None]
    new = beta * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * new[None, :]
    result = tl.sum(state * q[:, None], axis=0)
    target = found + (at * VALUE_HEADS + head) * VALUE_DIM
    tl.store(target + column, result, mask=is_column)
    page, is_left = page_left(row, last, slots, PAGE_SIZE)
    of_head = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
    place = state_out + page * STATE_STRIDE + of_head
    leaves = is_left & is_key[:, None] & is_column[None, :]
    tl.store(place, state, mask=leaves)
    return state


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
    DECAYS: tl.constexpr,
    WRITE_SCALE: tl.constexpr,
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
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = key < KEY_DIM, column < VALUE_DIM
    inside = is_key[:, None] & is_column[None, :]
    of_head = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
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
            qkv,
            b,
            a,
            slots,
            rate,
            dt_bias,
            found,
            state_out,
            KEY_HEADS,
            KEY_DIM,
            VALUE_HEADS,
            VALUE_DIM,
            DECAYS,
            WRITE_SCALE,
            PAGE_SIZE,
            STATE_STRIDE,
            QKV_STRIDE,
            A_STRIDE,
            B_STRIDE,
        )


@triton.jit
def small_inverses(lower, PRECISION: tl.constexpr):
    """(I + lower)^-1 of strictly lower matrices [..., 16, 16], by blocks of 1, 2, 4 and 8 rows:

        [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 @ C @ A^-1, B^-1]]

    Where keys are alike, powers of `lower` are thousands of times as large as the inverse, so it is
    no sum of them.
    """
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    result = tl.where(row == column, 1.0, 0.0) - tl.where((row ^ column) == 1, lower, 0.0)
    for step in tl.static_range(1, 4):
        below = tl.where((row ^ column) >> step == 1, lower, 0.0)
        known = tl.dot(below, result, input_precision=PRECISION)
        result -= tl.dot(result, known, input_precision=PRECISION)
    return result


@triton.jit
def diagonal_blocks(matrix, BLOCKS: tl.constexpr):
    """The blocks [BLOCKS, S, S] on the diagonal of a matrix of BLOCKS * S rows."""
    SIZE: tl.constexpr = matrix.shape[0] // BLOCKS
    parts = tl.reshape(matrix, [BLOCKS, SIZE, BLOCKS, SIZE])
    block = tl.arange(0, BLOCKS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(on_diagonal, parts, 0.0), axis=2)


@triton.jit
def lower_left(matrices):
    """The quarters [N, S, S] of matrices [N, 2 * S, 2 * S]."""
    NUMBER: tl.constexpr = matrices.shape[0]
    SIZE: tl.constexpr = matrices.shape[1] // 2
    parts = tl.reshape(matrices, [NUMBER, 2, SIZE, 2, SIZE])
    half = tl.arange(0, 2)
    is_lower = half[None, :, None, None, None] == 1
    is_left = half[None, None, None, :, None] == 0
    return tl.sum(tl.sum(tl.where(is_lower & is_left, parts, 0.0), axis=3), axis=1)


@triton.jit
def lower_triangles(first, below, last):
    """Matrices [N, 2 * S, 2 * S] of quarters [N, S, S]; the upper right ones are zero."""
    NUMBER: tl.constexpr = first.shape[0]
    SIZE: tl.constexpr = first.shape[1]
    halves = tl.join(tl.join(first, tl.zeros_like(first)), tl.join(below, last))
    rows = tl.permute(halves, 0, 4, 1, 3, 2)
    return tl.reshape(rows, [NUMBER, 2 * SIZE, 2 * SIZE])


@triton.jit
def larger_inverses(lower, inverses, PRECISION: tl.constexpr):
    """Of blocks of twice as many rows on the diagonal of I + lower, by those of its blocks
    [2 * N, S, S]."""
    NUMBER: tl.constexpr = inverses.shape[0] // 2
    SIZE: tl.constexpr = inverses.shape[1]
    pairs = tl.permute(tl.reshape(inverses, [NUMBER, 2, SIZE, SIZE]), 0, 2, 3, 1)
    first, last = tl.split(pairs)
    below = lower_left(diagonal_blocks(lower, NUMBER))
    known = tl.dot(below, first, input_precision=PRECISION)
    return lower_triangles(first, -tl.dot(last, known, input_precision=PRECISION), last)


@triton.jit
def inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower matrix of CHUNK rows: 16, 32 or 64."""
    if CHUNK == 16:
        result = small_inverses(lower, PRECISION)
    else:
        inverses = small_inverses(diagonal_blocks(lower, CHUNK // 16), PRECISION)
        for _ in tl.static_range(CHUNK // 32):
            inverses = larger_inverses(lower, inverses, PRECISION)
        result = tl.reshape(inverses, [CHUNK, CHUNK])
    return result


@triton.jit
def nearest_tf32(values):
    """The nearest numbers of tf32. A product of matrices takes the next ones towards zero, and
    where keys are alike, the errors of an inverse's rows add up."""
    return ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def key_rows(place, row, is_row, key, KEY_DIM: tl.constexpr, STRIDE: tl.constexpr):
    """Rows of queries or keys, as they are stored."""
    inside = is_row[:, None] & (key < KEY_DIM)[None, :]
    values = tl.load(place + row[:, None] * STRIDE + key[None, :], mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def unit_factors(values, scale):
    """Of rows: scale / their length."""
    return scale / tl.sqrt(tl.sum(values * values, axis=1) + 1e-6)


@triton.jit
def channel_products(q, k, sums, index, CHUNK: tl.constexpr):
    """K @ K.T and Q @ K.T of a chunk [CHUNK, KEYS], each channel's term of rows i and j by its own
    exp(sums[i] - sums[j]), for i >= j."""
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    for j in range(CHUNK):
        is_row = (index == j)[:, None]
        k_of_row = tl.sum(tl.where(is_row, k, 0.0), axis=0)
        sums_of_row = tl.sum(tl.where(is_row, sums, 0.0), axis=0)
        kept = k_of_row[None, :] * tl.exp(tl.minimum(sums - sums_of_row[None, :], 0.0))
        here = (index >= j)[:, None] & (index == j)[None, :]
        alike = tl.where(here, tl.sum(k * kept, axis=1)[:, None], alike)
        seen = tl.where(here, tl.sum(q * kept, axis=1)[:, None], seen)
    return alike, seen


@triton.jit
def decays_by_head(
    a, b, rate, dt_bias, row, is_row, head,
    WRITE_SCALE: tl.constexpr, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
):  # fmt: skip
    """Of a chunk's rows: the logarithms of decays, and the factors of what is written; zeros where
    there is no row."""
    log_decay, beta = head_gates(
        a, b, rate, dt_bias, row, is_row, head, WRITE_SCALE, A_STRIDE, B_STRIDE
    )
    return tl.where(is_row, log_decay, 0.0), tl.where(is_row, beta, 0.0)


@triton.jit
def decays_by_channel(
    a, b, rate, dt_bias, row, is_row, head, key,
    KEY_DIM: tl.constexpr, WRITE_SCALE: tl.constexpr, A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
):  # fmt: skip
    """As `decays_by_head`; logarithms [CHUNK, KEYS]."""
    is_pair = is_row[:, None] & (key < KEY_DIM)[None, :]
    of_rows = a + row[:, None] * A_STRIDE
    log_decay = channel_decays(of_rows, is_pair, key[None, :], rate, dt_bias, head, KEY_DIM)
    beta = writing_gate(b, row, is_row, head, WRITE_SCALE, B_STRIDE)
    return tl.where(is_pair, log_decay, 0.0), tl.where(is_row, beta, 0.0)


@triton.jit
def solve_chunk(
    qkv,
    b,
    a,
    rate,
    dt_bias,
    solved,
    seen,
    factors,
    begin,
    first,
    end,
    head,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DECAYS: tl.constexpr,
    WRITE_SCALE: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):
    """What holds no state of rows [first, end) of the chunk that begins at `begin`: the matrices
    (I + strictly_lower(beta * (K @ K.T) * D))^-1 and (Q @ K.T) * D, and factors of rows."""
    key = tl.arange(0, KEYS)
    index = tl.arange(0, CHUNK)
    row = begin + index
    is_row = (index < ROWS) & (row >= first) & (row < end)
    at = row.to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    of_keys = qkv + (KEY_HEADS + key_head) * KEY_DIM
    k = key_rows(of_keys, at, is_row, key, KEY_DIM, QKV_STRIDE)
    q = key_rows(qkv + key_head * KEY_DIM, at, is_row, key, KEY_DIM, QKV_STRIDE)
    k_by, q_by = unit_factors(k, 1.0), unit_factors(q, KEY_DIM**-0.5)
    if SCALED:
        k, q = k * k_by[:, None], q * q_by[:, None]
        k_by, q_by = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32)
    if DECAYS == 1:
        decays, beta = decays_by_head(
            a, b, rate, dt_bias, at, is_row, head, WRITE_SCALE, A_STRIDE, B_STRIDE
        )
        sums = tl.cumsum(decays, axis=0)
        is_lower = index[:, None] >= index[None, :]
        between = tl.where(is_lower, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)
        between *= k_by[None, :]
        alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * k_by[:, None]
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * q_by[:, None]
        of_rows = factors + (at * VALUE_HEADS + head) * FACTORS
        tl.store(of_rows, beta, mask=is_row)
        tl.store(of_rows + 1, beta * tl.exp(sums) * k_by, mask=is_row)
        tl.store(of_rows + 2, tl.exp(sums) * q_by, mask=is_row)
        tl.store(of_rows + 3, k_by, mask=is_row)
        tl.store(of_rows + 4, sums, mask=is_row)
    else:
        decays, beta = decays_by_channel(
            a, b, rate, dt_bias, at, is_row, head, key, KEY_DIM, WRITE_SCALE, A_STRIDE, B_STRIDE
        )
        sums = tl.cumsum(decays, axis=0)
        alike, products = channel_products(q, k, sums, index, CHUNK)
    lower = tl.where(index[:, None] > index[None, :], beta[:, None] * alike, 0.0)
    place = (at * VALUE_HEADS + head)[:, None] * CHUNK + index[None, :]
    solution = inverse(lower, CHUNK, INVERSE_PRECISION)
    if PRECISION == "tf32":
        solution = nearest_tf32(solution)
    tl.store(solved + place, solution, mask=is_row[:, None])
    tl.store(seen + place, products, mask=is_row[:, None])


@triton.jit
def delta_pairs(
    qkv,
    b,
    a,
    query_start,
    context_lens,
    rate,
    dt_bias,
    dims,
    solved,
    seen,
    factors,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DECAYS: tl.constexpr,
    WRITE_SCALE: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """solved and seen [T, VALUE_HEADS, CHUNK]: of each row, its row of `solve_chunk`'s matrices.
    factors [T, VALUE_HEADS, FACTORS], where decays are of heads: of each row what multiplies its
    value, what its key gives of the state, what its query gives of it, its key, and the sum of the
    logarithms of its chunk's decays up to it.

    They do not depend on the state, so all chunks are taken at once. A program has the chunks whose
    first rows of this step are among CHUNK neighbouring rows, for one head.
    """
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    head = tl.program_id(0) % VALUE_HEADS
    row = tl.program_id(0) // VALUE_HEADS * CHUNK
    stop = tl.minimum(row + CHUNK, tl.load(dims))
    number = tl.arange(0, SEQUENCES)
    ends = tl.load(query_start + 1 + number, mask=number < tl.load(dims + 1), other=1 << 30)
    while row < stop:
        sequence = tl.sum((ends <= row).to(tl.int32), axis=0)
        first = tl.load(query_start + sequence)
        end = tl.load(query_start + sequence + 1)
        skipped = (tl.load(context_lens + sequence) - end + row) % ROWS
        begin = row - skipped
        if (skipped == 0) | (row == first):
            solve_chunk(
                qkv,
                b,
                a,
                rate,
                dt_bias,
                solved,
                seen,
                factors,
                begin,
                row,
                end,
                head,
                KEY_HEADS,
                KEY_DIM,
                VALUE_HEADS,
                DECAYS,
                WRITE_SCALE,
                QKV_STRIDE,
                A_STRIDE,
                B_STRIDE,
                KEYS,
                CHUNK,
                ROWS,
                PRECISION,
                INVERSE_PRECISION,
                SCALED,
            )
        row = tl.minimum(begin + ROWS, end)


@triton.jit
def chunk_by_head(
    state, q, k, v, inverted, products, factors, row, is_row, last_row,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(results of a chunk's rows, the state after them).

    Args:
        row: where the factors of each row are.
        last_row: where those of the chunk's last row are.
    """
    written = tl.load(factors + row, mask=is_row, other=0.0)
    of_known = tl.load(factors + row + 1, mask=is_row, other=0.0)
    of_result = tl.load(factors + row + 2, mask=is_row, other=0.0)
    of_key = tl.load(factors + row + 3, mask=is_row, other=0.0)
    sums = tl.load(factors + row + 4, mask=is_row, other=0.0)
    total = tl.load(factors + last_row + 4)
    known = tl.dot(k, state, input_precision=PRECISION)
    new = written[:, None] * v - of_known[:, None] * known
    new = tl.dot(inverted, new, input_precision=PRECISION)
    result = tl.dot(q, state, input_precision=PRECISION) * of_result[:, None]
    result += tl.dot(products, new, input_precision=PRECISION)
    # Rows that are not there have nothing new, and no sum: its exponent would be infinite.
    remembered = of_key * tl.exp(tl.minimum(total - sums, 0.0))
    added = tl.dot(tl.trans(k), remembered[:, None] * new, input_precision=PRECISION)
    return result, state * tl.exp(total) + added


@triton.jit
def chunk_by_channel(
    state, q, k, v, inverted, products, decays, beta,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(results of a chunk's rows, the state after them), with queries and keys of their lengths."""
    sums, total = tl.cumsum(decays, axis=0), tl.sum(decays, axis=0)
    decayed = tl.exp(sums)
    known = tl.dot(k * decayed, state, input_precision=PRECISION)
    new = tl.dot(inverted, beta[:, None] * (v - known), input_precision=PRECISION)
    result = tl.dot(q * decayed, state, input_precision=PRECISION)
    result += tl.dot(products, new, input_precision=PRECISION)
    added = tl.trans(k * tl.exp(tl.minimum(total[None, :] - sums, 0.0)))
    state = state * tl.exp(total)[:, None]
    return result, state + tl.dot(added, new, input_precision=PRECISION)


@triton.jit
def delta_chunks(
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
    solved,
    seen,
    factors,
    found,
    state_out,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAYS: tl.constexpr,
    WRITE_SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    LEAST_SEQUENCES: tl.constexpr,
    MOST_SEQUENCES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """found [T, VALUE_HEADS * VALUE_DIM], before the norm, by what `delta_pairs` left. A chunk has
    ROWS of CHUNK rows at most, which divide PAGE_SIZE, so that none has rows of two pages. A step
    of fewer or more sequences is another launch's."""
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    sequence = tl.program_id(0) // (VALUE_HEADS * PARTS)
    head = tl.program_id(0) // PARTS % VALUE_HEADS
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    is_column = column < VALUE_DIM
    inside = (key < KEY_DIM)[:, None] & is_column[None, :]
    of_head = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + column[None, :]
    num_sequences = tl.load(dims + 1)
    is_mine = (num_sequences >= LEAST_SEQUENCES) & (num_sequences <= MOST_SEQUENCES)
    first, own, last, position, old = find_rows(
        sequence,
        query_start,
        context_lens,
        page_table,
        slots,
        tl.where(is_mine, num_sequences, 0),
        PAGE_SIZE,
        TABLE_WIDTH,
    )
    state = state_before(state_out, old, of_head, inside, STATE_STRIDE)
    tail = first_single(first, own, slots, PAGE_SIZE)
    index = tl.arange(0, CHUNK)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    of_queries = qkv + key_head * KEY_DIM
    of_keys = qkv + (KEY_HEADS + key_head) * KEY_DIM
    of_values = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    end_chunk = tl.where(tail > first, tl.cdiv(position + tail - first, ROWS), 0)
    for chunk in range(position // ROWS, end_chunk):
        begin = first + chunk * ROWS - position
        row = begin + index
        is_row = (index < ROWS) & (row >= first) & (row < tail)
        last_row = tl.maximum(tl.minimum(begin + ROWS, tail) - 1, first)
        at = row.to(tl.int64)
        k = key_rows(of_keys, at, is_row, key, KEY_DIM, QKV_STRIDE)
        q = key_rows(of_queries, at, is_row, key, KEY_DIM, QKV_STRIDE)
        if SCALED:
            k *= unit_factors(k, 1.0)[:, None]
            q *= unit_factors(q, KEY_DIM**-0.5)[:, None]
        is_value = is_row[:, None] & is_column[None, :]
        of_rows = of_values + at[:, None] * QKV_STRIDE + column[None, :]
        v = tl.load(of_rows, mask=is_value, other=0.0).to(tl.float32)
        pairs = (at * VALUE_HEADS + head)[:, None] * CHUNK + index[None, :]
        inverted = tl.load(solved + pairs, mask=is_row[:, None], other=0.0)
        products = tl.load(seen + pairs, mask=is_row[:, None], other=0.0)
        if DECAYS == 1:
            place = (at * VALUE_HEADS + head) * FACTORS
            of_last = (last_row.to(tl.int64) * VALUE_HEADS + head) * FACTORS
            result, state = chunk_by_head(
                state, q, k, v, inverted, products,
                factors, place, is_row, of_last, PRECISION,
            )  # fmt: skip
        else:
            decays, beta = decays_by_channel(
                a, b, rate, dt_bias, at, is_row, head, key,
                KEY_DIM, WRITE_SCALE, A_STRIDE, B_STRIDE,
            )  # fmt: skip
            result, state = chunk_by_channel(
                state, q, k, v, inverted, products, decays, beta, PRECISION
            )
        target = found + (at * VALUE_HEADS + head)[:, None] * VALUE_DIM + column[None, :]
        tl.store(target, result, mask=is_value)
        page, is_left = page_left(last_row, last, slots, PAGE_SIZE)
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
            qkv,
            b,
            a,
            slots,
            rate,
            dt_bias,
            found,
            state_out,
            KEY_HEADS,
            KEY_DIM,
            VALUE_HEADS,
            VALUE_DIM,
            DECAYS,
            WRITE_SCALE,
            PAGE_SIZE,
            STATE_STRIDE,
            QKV_STRIDE,
            A_STRIDE,
            B_STRIDE,
        )


@triton.jit
def gated_norm(
    z,
    norm,
    pre_scale,
    out_scale,
    dims,
    found,
    out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    GATE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = quantize(rms_norm(found) * norm * gate(z)), BLOCK_HEADS heads of a row a program."""
    PARTS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    head = tl.program_id(0) % PARTS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK)
    at = head[:, None] * WIDTH + column[None, :]
    inside = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    if row < tl.load(dims):
        values = tl.load(found + row * (HEADS * WIDTH) + at, mask=inside, other=0.0)
        by = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / WIDTH + EPS)
        weight = tl.load(norm + column, mask=column < WIDTH, other=0.0)
        gate = tl.load(z + row * Z_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
        if GATE == "silu":
            result = values * by[:, None] * weight[None, :] * (gate / (1.0 + tl.exp(-gate)))
        else:
            result = values * by[:, None] * weight[None, :] * tl.sigmoid(gate)
        by_column = None if pre_scale is None else tl.load(pre_scale + at, mask=inside, other=1.0)
        by_all = None if out_scale is None else tl.load(out_scale)
        codes = quantized(result, by_column, by_all, z.dtype.element_ty, out.dtype.element_ty)
        tl.store(out + row * OUT_STRIDE + at, codes, mask=inside)
