"""Triton functions that the operators' kernels share.

A kernel with the constant OVERLAPS may be launched by programmatic dependent launch (PDL). It then
runs beside the end of the kernel before it:

    launch_dependents    the next kernel may start as well
    (read weights, scales, dims and other inputs that the host wrote before the step)
    wait_for_inputs      the kernel before has ended, and what it wrote can be seen
    (all the rest)
    wait_last            (a kernel that may run beside the one before it: gpu/concurrent.py)

Every program waits, also one that has nothing to do: the kernel after the next one relies on it.

OVERLAPS: False; True; 2, the next kernel starts only when this one's wait is over; 3, the wait is
the last thing that a program does.
"""

import triton
import triton.language as tl


@triton.jit
def launch_dependents(OVERLAPS: tl.constexpr):
    if OVERLAPS == 1 or OVERLAPS == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    if OVERLAPS == 1 or OVERLAPS == 2:
        tl.extra.cuda.gdc_wait()
    if OVERLAPS == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_last(OVERLAPS: tl.constexpr):
    if OVERLAPS == 3:
        tl.extra.cuda.gdc_wait()


@triton.jit
def row_and_columns(COLUMNS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The row and [BLOCK] columns of this program, of ceil(COLUMNS / BLOCK) programs a row.

    A thread gets VECTOR columns next to each other.
    """
    PARTS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    column = program % PARTS * BLOCK + tl.arange(0, BLOCK)
    return row, tl.max_contiguous(column, VECTOR)


@triton.jit
def activated(
    gate,
    GELU_TANH: tl.constexpr,
    QUICK_GELU: tl.constexpr = False,
    RELU2: tl.constexpr = False,
):
    """silu(gate), or gelu in its tanh form or as gate * sigmoid(1.702 gate), or relu(gate)^2."""
    if RELU2:
        positive = tl.maximum(gate, 0.0)
        result = positive * positive
    else:
        exponent = 1.702 * gate if QUICK_GELU else gate
        if GELU_TANH:
            # x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), which does not cancel; 2 sqrt(2 / pi).
            exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-exponent))
    return result


@triton.jit
def softcapped(values, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(values / SOFTCAP), where tanh(x) = 2 sigmoid(2 x) - 1."""
    return SOFTCAP * (2.0 * tl.sigmoid(2.0 * values / SOFTCAP) - 1.0)


@triton.jit
def softplus(values):
    """log(1 + exp(values)), as PyTorch computes it: the value itself above 20."""
    return tl.where(values > 20.0, values, tl.log(1.0 + tl.exp(tl.minimum(values, 20.0))))


@triton.jit
def quantized(values, pre_scale, out_scale, THROUGH: tl.constexpr, OUT: tl.constexpr):
    """plugins/rounding.py's `quantize` of f32 `values`, bit for bit.

    `pre_scale` and `out_scale` are loaded values, or None.
    """
    values = values.to(THROUGH).to(tl.float32)
    if pre_scale is not None:
        values = (values * pre_scale).to(THROUGH).to(tl.float32)
    if out_scale is None:
        result = _saturated(values, 1.0, OUT)
    elif OUT.is_fp8e4nv() or OUT.is_int8():
        result = divided(_saturated(values, out_scale, OUT), out_scale)
    else:
        result = tl.div_rn(values, out_scale)
    return _in_units(result, OUT).to(OUT)


@triton.jit
def _in_units(values, OUT: tl.constexpr):
    """Integers, if OUT's codes are."""
    if OUT.is_int8():
        # Adding 1.5 * 2^23 leaves no bits for a fraction.
        values = values + 12582912.0 - 12582912.0
    return values


@triton.jit
def scaled_to(values, pre_scale, THROUGH: tl.constexpr):
    """What `quantized` divides: f32 `values` rounded to THROUGH, times `pre_scale` (or None)."""
    values = values.to(THROUGH).to(tl.float32)
    if pre_scale is not None:
        values = (values * pre_scale).to(THROUGH).to(tl.float32)
    return values


@triton.jit
def hadamard(rows, BLOCK: tl.constexpr):
    """[R, W] times Hadamard matrices of +-1, in blocks of a power of two that divides W:
    plugins/hadamard.py's products, to the same bits.

    A round adds and subtracts the halves of a block and lays the results side by side; after
    log2(BLOCK) of them the first bit of a column is the first again.
    """
    HEIGHT: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = rows.shape[1]
    BLOCKS: tl.constexpr = HEIGHT * WIDTH // BLOCK
    ROUNDS: tl.constexpr = (
        (BLOCK > 1) + (BLOCK > 2) + (BLOCK > 4) + (BLOCK > 8) + (BLOCK > 16)
        + (BLOCK > 32) + (BLOCK > 64) + (BLOCK > 128) + (BLOCK > 256)
    )  # fmt: skip
    turned = tl.reshape(rows, BLOCKS, BLOCK)
    for _ in tl.static_range(ROUNDS):
        halves = tl.permute(tl.reshape(turned, BLOCKS, 2, BLOCK // 2), (0, 2, 1))
        one, other = tl.split(halves)
        turned = tl.reshape(tl.join(one + other, one - other), BLOCKS, BLOCK)
    return tl.reshape(turned, HEIGHT, WIDTH)


@triton.jit
def _hadamard_of_row(values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`hadamard` of [SIZE] values, of which so many lie in shared memory at once as fit there for
    every SM: 32 KiB."""
    if SIZE > 8192:
        one, other = tl.split(tl.permute(tl.reshape(values, 2, SIZE // 2), (1, 0)))
        one = _hadamard_of_row(one, SIZE // 2, BLOCK)
        other = _hadamard_of_row(other, SIZE // 2, BLOCK)
        values = tl.reshape(tl.permute(tl.join(one, other), (1, 0)), SIZE)
    else:
        blocks = tl.reshape(values, SIZE // BLOCK, BLOCK)
        values = tl.reshape(hadamard(blocks, BLOCK), SIZE)
    return values


@triton.jit
def quantized_rows(
    values,
    row_scale,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
):
    """plugins/rounding.py's `quantize_rows` of [BLOCK] values, which are zeros beyond
    COLUMNS, after a Hadamard matrix for each HADAMARD of them; 0: as they are.

    Stores the scales at `row_scale`, one of all values or one for each COLUMNS / SCALES.
    """
    if HADAMARD > 0:
        # A product that values are is rounded before it is added to others.
        values = _hadamard_of_row(values + 0.0, BLOCK, HADAMARD)
    if SCALES == 1:
        scale = _scale_of(tl.max(tl.abs(values), 0), OUT)
        tl.store(row_scale, scale)
        codes = _codes(values, scale, OUT)
    else:
        WIDTH: tl.constexpr = COLUMNS // SCALES
        groups = tl.reshape(values, BLOCK // WIDTH, WIDTH)
        scales = _scale_of(tl.max(tl.abs(groups), 1), OUT)
        group = tl.arange(0, BLOCK // WIDTH)
        tl.store(row_scale + group, scales, mask=group < SCALES)
        codes = tl.reshape(_codes(groups, scales[:, None], OUT), BLOCK)
    return codes


@triton.jit
def _codes(values, scale, OUT: tl.constexpr):
    """`values` / `scale`, which are within OUT's range but for a rounding of it."""
    return _in_units(divided(values, scale), OUT).to(OUT)


@triton.jit
def largest_of(rows):
    """The largest magnitude of each row."""
    return tl.max(tl.abs(rows), 1)


@triton.jit
def is_finite(rows):
    """Whether all of a row are finite: 0 times NaN or infinity is NaN."""
    return tl.sum(rows * 0.0, 1) == 0.0


@triton.jit
def scale_of_head(largest, finite, OUT: tl.constexpr):
    """The scale of each head of a cache, by its largest magnitude; NaN if it is not `finite`."""
    return tl.where(finite, _scale_of(largest, OUT), float("nan"))


@triton.jit
def _scale_of(largest, OUT: tl.constexpr):
    LARGEST_CODE: tl.constexpr = 127.0 if OUT.is_int8() else 448.0
    return tl.div_rn(tl.maximum(largest, 1e-10), LARGEST_CODE)


@triton.jit
def _saturated(values, unit, OUT: tl.constexpr):
    """`values` within OUT's range of units; NaN stays one."""
    if OUT.is_fp8e4nv():
        values = tl.clamp(values, -448.0 * unit, 448.0 * unit, propagate_nan=tl.PropagateNan.ALL)
    if OUT.is_int8():
        values = tl.clamp(values, -128.0 * unit, 127.0 * unit)
    return values


@triton.jit
def divided(values, by):
    """values / by, rounded once: a product with the inverse and one correction by the remainder
    (Markstein 1990), for quotients that do not overflow. Where one number divides many, a tenth of
    `tl.div_rn`'s instructions."""
    inverse = tl.div_rn(1.0, by)
    quotient = values * inverse
    # The remainder of a division by infinity would be NaN; its inverse corrects nothing.
    divisor = tl.where(inverse != 0.0, by, 0.0)
    return tl.fma(tl.fma(-quotient, divisor, values), inverse, quotient)


@triton.jit
def find_state(
    sequence,
    row,
    start,
    page_table,
    slots,
    MOST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """The page with the state that a sequence goes on from, and how many rows before its first one,
    at most MOST, this step has added since: those of the sequences of one token, each of which
    goes on from what the row before it leaves."""
    table = page_table + sequence.to(tl.int64) * TABLE_WIDTH
    page = tl.load(table + tl.maximum(start - 1, 0) // PAGE_SIZE)
    behind = 0
    for back in tl.static_range(MOST):
        is_there = sequence > back
        left = tl.load(slots + row - back - 1, mask=is_there, other=-PAGE_SIZE) // PAGE_SIZE
        older = table - (back + 1) * TABLE_WIDTH + tl.maximum(start - back - 2, 0) // PAGE_SIZE
        older_page = tl.load(older, mask=is_there, other=0)
        follows = (behind == back) & (start > back) & (left == page)
        page = tl.where(follows, older_page, page)
        behind += follows.to(tl.int32)
    return page.to(tl.int64), behind


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
    """The rows of a sequence, where those of the drafts behind it end, the position of its first
    row, and the page with the state that they go on from: -1 if they are a sequence's first tokens.
    No rows for a sequence that is a draft."""
    first, own, last, position = 0, 0, 0, 0
    old = tl.full([], -1, tl.int64)
    if sequence < num_sequences:
        first = tl.load(query_start + sequence)
        own = tl.load(query_start + sequence + 1)
        position = tl.load(context_lens + sequence) - (own - first)
        page, behind = find_state(
            sequence, first, position, page_table, slots, 1, PAGE_SIZE, TABLE_WIDTH
        )
        old = tl.where(position > 0, page, old)
        own = tl.where(behind > 0, first, own)
        last = own
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
    return first, own, last, position, old


@triton.jit
def state_before(state_out, old, place, inside, STATE_STRIDE: tl.constexpr):
    """The part `place` of the state in page `old`, as `find_rows` gives it; zeros where there is
    none and where not `inside`."""
    kept = state_out + tl.maximum(old, 0) * STATE_STRIDE + place
    state = tl.load(kept, mask=inside & (old >= 0), other=0.0)
    # Threads that hold the same values read them before any of them writes.
    tl.debug_barrier()
    return state


@triton.jit
def first_single(first, own, slots, PAGE_SIZE: tl.constexpr):
    """Of a sequence's rows [first, own), where those begin that go one at a time: a step's only
    one, or a last one that leaves its state elsewhere than the row before it."""
    single = own
    if own - first > 1:
        last_page = tl.load(slots + own - 1) // PAGE_SIZE
        page_before = tl.load(slots + own - 2) // PAGE_SIZE
        single = tl.where(last_page != page_before, own - 1, own)
    elif own > first:
        single = first
    return single


@triton.jit
def page_left(row, last, slots, PAGE_SIZE: tl.constexpr):
    """The page in which a row leaves its state, and whether the row after it, if one comes before
    `last`, does so elsewhere."""
    page = tl.load(slots + row) // PAGE_SIZE
    next_page = tl.load(slots + row + 1, mask=row + 1 < last, other=-PAGE_SIZE) // PAGE_SIZE
    return page.to(tl.int64), next_page != page
