"""Triton kernels of routed experts; cuda.py says how they follow each other.

A pair is a row and one of its experts, row * TOP_K + rank. A block is some pairs of one expert.
"""

import triton
import triton.language as tl

from trtc.plugins.gemm.triton.weights import product
from trtc.plugins.gpu.triton import (
    activated,
    launch_dependents,
    quantized,
    quantized_rows,
    row_and_columns,
    scaled_to,
    wait_for_inputs,
    wait_last,
)


@triton.jit
def scores_of_groups(
    ranks, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
):  # fmt: skip
    """[EXPERTS_PAD]: what the group of each expert is chosen by."""
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    e = tl.arange(0, EXPERTS_PAD)
    found = tl.full([EXPERTS_PAD], float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        is_member = e // SIZE == group
        members = tl.where(is_member, ranks, float("-inf"))
        score = tl.max(members, 0)
        if TOP2_SUM:
            score += tl.max(tl.where(e == tl.argmax(members, 0), float("-inf"), members), 0)
        found = tl.where(is_member, score, found)
    return found


@triton.jit
def without_closed_groups(
    ranks, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2_SUM: tl.constexpr,
):  # fmt: skip
    """`ranks`, and -inf outside of the TOP_GROUPS best groups."""
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    group = tl.arange(0, EXPERTS_PAD) // SIZE
    left = scores_of_groups(ranks, NUM_EXPERTS, EXPERTS_PAD, NUM_GROUPS, TOP2_SUM)
    opened = tl.full([EXPERTS_PAD], float("-inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(left, 0) // SIZE  # of equal ones the first
        opened = tl.where(group == best, ranks, opened)
        left = tl.where(group == best, float("-inf"), left)
    return opened


@triton.jit
def route(
    router_logits,
    choice_bias,
    expert_scale,
    expert_map,
    x,
    gate_up_pre_scale,
    gate_up_input_scale,
    gate_up_order,
    dims,
    experts,
    shares,
    given,
    given_scale,
    COUNT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
    SIGMOID: tl.constexpr,
    SPARSEMIXER: tl.constexpr,
    MARGIN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    WEIGHS_INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALES: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """What plugins/moe/routing.py defines, with the experts' numbers on this rank. `given` is None
    when experts multiply x as it is.

    PAIRS: of a program, 1 or all TOP_K of a row. SCALES: of a row of `given`, in given_scale, and
    then a row fits into BLOCK; 0: they have none. HADAMARD: as `quantized_rows`.
    """
    launch_dependents(OVERLAPS)
    first_pair = tl.program_id(0) * PAIRS
    row = (first_pair // TOP_K).to(tl.int64)
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if row < num_rows:
        e = tl.arange(0, EXPERTS_PAD)
        at = router_logits + row * LOGITS_STRIDE + e
        logits = tl.load(at, mask=e < NUM_EXPERTS, other=float("-inf"))
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-logits))
            total = 1.0
        else:
            scores = tl.exp(logits - tl.max(logits, 0))
            total = tl.sum(scores, 0)
        left = logits
        if choice_bias is not None:
            bias = tl.load(choice_bias + e, mask=e < NUM_EXPERTS, other=float("-inf"))
            left = scores / total + bias
        elif NUM_GROUPS > 1:
            left = tl.where(e < NUM_EXPERTS, scores / total, float("-inf"))
        if NUM_GROUPS > 1:
            left = without_closed_groups(
                left, NUM_EXPERTS, EXPERTS_PAD, NUM_GROUPS, TOP_GROUPS, TOP2_SUM
            )
        chosen = 0.0
        ranks = tl.arange(0, TOP_PAD)
        best_of = tl.zeros([TOP_PAD], tl.int32)
        share_of = tl.zeros([TOP_PAD], tl.float32)
        for rank in tl.static_range(TOP_K):
            best = tl.argmax(left, 0)  # of equal ones the first
            if SPARSEMIXER:
                largest = tl.max(left, 0)
                bound = MARGIN * tl.maximum(tl.abs(logits), largest)
                near = tl.where(largest - left <= bound, tl.exp(left - largest), 0.0)
                score = 1.0 / tl.sum(near, 0)
            else:
                score = tl.sum(tl.where(e == best, scores, 0.0), 0) / total
            best_of = tl.where(ranks == rank, best, best_of)
            share_of = tl.where(ranks == rank, score, share_of)
            chosen += score
            left = tl.where(e == best, float("-inf"), left)
        if RENORMALIZE:
            share_of = share_of / (chosen + EPSILON)
        share_of = share_of * SCALE
        if expert_scale is not None:
            share_of = share_of * tl.load(expert_scale + best_of)
        if expert_map is not None:
            best_of = tl.load(expert_map + best_of)
        pair_of = row.to(tl.int32) * TOP_K + ranks
        is_mine = (pair_of >= first_pair) & (pair_of < first_pair + PAIRS) & (ranks < TOP_K)
        tl.store(experts + pair_of, best_of, mask=is_mine)
        weights = tl.full([TOP_PAD], 1.0, tl.float32) if WEIGHS_INPUTS else share_of
        tl.store(shares + pair_of, weights, mask=is_mine)
        if given is not None:
            THROUGH: tl.constexpr = x.dtype.element_ty
            for number in tl.range(0, PAIRS):
                pair = first_pair + number
                is_it = pair_of == pair
                expert = tl.maximum(tl.sum(tl.where(is_it, best_of, 0), 0), 0)
                share = tl.sum(tl.where(is_it, share_of, 0.0), 0)
                by = None if gate_up_input_scale is None else tl.load(gate_up_input_scale + expert)
                for begin in tl.range(0, DEPTH, BLOCK):
                    k = begin + tl.arange(0, BLOCK)
                    inside = k < DEPTH
                    source = k
                    if gate_up_order is not None:
                        order = gate_up_order + tl.cast(expert, tl.int64) * DEPTH + k
                        source = tl.load(order, mask=inside, other=0)
                    from_x = x + row * X_STRIDE + source
                    values = tl.load(from_x, mask=inside, other=0.0).to(tl.float32)
                    if WEIGHS_INPUTS:
                        values = (values * share).to(THROUGH).to(tl.float32)
                    by_channel = None
                    if gate_up_pre_scale is not None:
                        scales = gate_up_pre_scale + tl.cast(expert, tl.int64) * DEPTH + k
                        by_channel = tl.load(scales, mask=inside, other=1.0)
                    if SCALES > 0:
                        values = quantized_rows(
                            scaled_to(values, by_channel, THROUGH),
                            given_scale + pair.to(tl.int64) * SCALES,
                            DEPTH, SCALES, HADAMARD, BLOCK, given.dtype.element_ty,
                        )  # fmt: skip
                    else:
                        values = quantized(values, by_channel, by, THROUGH, given.dtype.element_ty)
                    tl.store(given + pair.to(tl.int64) * DEPTH + k, values, mask=inside)
    wait_last(OVERLAPS)


@triton.jit
def gather(
    experts,
    dims,
    counts,
    members,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """members [experts, CAPACITY]: the pairs that chose each expert, counts[expert] of them. Pairs
    of other ranks' experts, whose number is -1, are nobody's."""
    launch_dependents(OVERLAPS)
    expert = tl.program_id(0)
    num_pairs = tl.load(dims + COUNT) * TOP_K
    wait_for_inputs(OVERLAPS)
    count = 0
    for begin in tl.range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        chose = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        place = count + tl.cumsum(chose.to(tl.int32), 0) - 1
        tl.store(members + expert * CAPACITY + place, pair, mask=chose)
        count += tl.sum(chose.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit
def block_of_pairs(
    block,
    experts,
    counts,
    members,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(expert, [BLOCK_M] pairs, how many of them there are). None: 0.

    Without counts a block is one pair, and with them a part of an expert's.
    """
    m = tl.arange(0, BLOCK_M)
    if counts is None:
        expert = tl.load(experts + block, mask=block < num_pairs, other=-1)
        found = (expert >= 0).to(tl.int32)
        pairs = block + m * 0
    else:
        e = tl.arange(0, EXPERTS_PAD)
        sizes = tl.load(counts + e, mask=e < NUM_EXPERTS, other=0)
        blocks = (sizes + BLOCK_M - 1) // BLOCK_M
        ends = tl.cumsum(blocks, 0)
        expert = tl.sum((ends <= block).to(tl.int32), 0)
        is_it = e == expert
        first = (block - tl.sum(tl.where(is_it, ends - blocks, 0), 0)) * BLOCK_M
        found = tl.minimum(tl.sum(tl.where(is_it, sizes, 0), 0) - first, BLOCK_M)
        found = tl.where(expert < NUM_EXPERTS, found, 0)
        pairs = tl.load(members + expert * CAPACITY + first + m, mask=m < found, other=0)
    return expert, pairs, found


@triton.jit
def times_one_scale(sums, x_scale, rows, is_row, SCALES: tl.constexpr):
    if SCALES == 1:
        sums = sums * tl.load(x_scale + rows, mask=is_row, other=0.0)[:, None]
    return sums


@triton.jit
def round_rows(
    active,
    dims,
    hidden,
    hidden_scale,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """hidden[pair] = active[pair] in codes, with their scales."""
    launch_dependents(OVERLAPS)
    pair = tl.program_id(0).to(tl.int64)
    num_pairs = tl.load(dims + COUNT) * TOP_K
    wait_for_inputs(OVERLAPS)
    if pair < num_pairs:
        column = tl.arange(0, BLOCK)
        inside = column < COLUMNS
        values = tl.load(active + pair * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
        codes = quantized_rows(
            values, hidden_scale + pair * SCALES, COLUMNS, SCALES, HADAMARD, BLOCK,
            hidden.dtype.element_ty,
        )  # fmt: skip
        tl.store(hidden + pair * COLUMNS + column, codes, mask=inside)


@triton.jit
def gate_up(
    given,
    given_scale,
    gate_up,
    gate_up_scale,
    gate_up_zero,
    gate_up_input_scale,
    gate_up_bias,
    gate_up_scale_unit,
    down_pre_scale,
    down_input_scale,
    experts,
    counts,
    members,
    dims,
    hidden,
    COUNT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS_OF_PAIRS: tl.constexpr,
    SCALES: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GIVEN_STRIDE: tl.constexpr,
    NIBBLES: tl.constexpr,
    SIGNED: tl.constexpr,
    E2M1: tl.constexpr,
    TILES: tl.constexpr,
    THROUGH_BF16: tl.constexpr,
    PARTS: tl.constexpr,
    GELU_TANH: tl.constexpr,
    QUICK_GELU: tl.constexpr,
    RELU2: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """hidden[pair] = activation(gate) * up of COLUMNS columns, or activation(up) where PARTS is 1,
    as `down` multiplies it.

    ROWS_OF_PAIRS: pairs that share a row of `given`: TOP_K when that is x itself, else 1.
    """
    launch_dependents(OVERLAPS)
    num_pairs = tl.load(dims + COUNT) * TOP_K
    wait_for_inputs(OVERLAPS)
    expert, pairs, found = block_of_pairs(
        tl.program_id(1), experts, counts, members, num_pairs,
        NUM_EXPERTS, EXPERTS_PAD, CAPACITY, BLOCK_M,
    )  # fmt: skip
    if found > 0:
        m = tl.arange(0, BLOCK_M)
        OPERAND: tl.constexpr = given.dtype.element_ty
        THROUGH: tl.constexpr = tl.bfloat16 if THROUGH_BF16 else tl.float32
        # Gate and up of a column lie side by side; columns after the last are computed as it.
        WIDTH: tl.constexpr = PARTS * BLOCK_N
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, WIDTH) // PARTS
        row = tl.minimum(n, COLUMNS - 1) + tl.arange(0, WIDTH) % PARTS * COLUMNS
        both = product(
            given + (pairs // ROWS_OF_PAIRS).to(tl.int64) * GIVEN_STRIDE, m < found,
            gate_up, gate_up_scale, gate_up_zero, row + expert.to(tl.int64) * (PARTS * COLUMNS),
            DEPTH, GROUP, NIBBLES, SIGNED, TILES, OPERAND, BLOCK_M, WIDTH, BLOCK_K, STAGES,
            E2M1, given_scale + pairs.to(tl.int64) * SCALES if SCALES > 1 else None, WEIGHTS_FIRST,
        )  # fmt: skip
        if gate_up_scale_unit is not None:
            units = gate_up_scale_unit + expert.to(tl.int64) * (PARTS * COLUMNS) + row
            both = both * tl.load(units)[None, :]
        both = times_one_scale(both, given_scale, pairs, m < found, SCALES)
        if gate_up_input_scale is not None:
            both = both * tl.load(gate_up_input_scale + expert)
        if gate_up_bias is not None:
            both += tl.load(gate_up_bias + expert.to(tl.int64) * (PARTS * COLUMNS) + row)[None, :]
        both = both.to(THROUGH).to(tl.float32)
        if PARTS == 1:
            inner = activated(both, GELU_TANH, QUICK_GELU, RELU2)
        else:
            gate, up = tl.split(tl.reshape(both, BLOCK_M, BLOCK_N, 2))
            if LIMIT > 0:
                gate = tl.minimum(gate, LIMIT)
                up = tl.clamp(up, -LIMIT, LIMIT)
            active = activated(gate, GELU_TANH, QUICK_GELU).to(THROUGH).to(tl.float32)
            inner = active * (up + UP_OFFSET)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        by_column = None
        if down_pre_scale is not None:
            scales = down_pre_scale + expert.to(tl.int64) * COLUMNS + column
            by_column = tl.load(scales, mask=column < COLUMNS, other=1.0)[None, :]
        by = None if down_input_scale is None else tl.load(down_input_scale + expert)
        result = quantized(inner, by_column, by, THROUGH, hidden.dtype.element_ty)
        at = pairs.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(hidden + at, result, mask=(m < found)[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def down(
    hidden,
    hidden_scale,
    down,
    down_scale,
    down_zero,
    down_input_scale,
    down_bias,
    down_scale_unit,
    experts,
    counts,
    members,
    dims,
    results,
    COUNT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    SCALES: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    SIGNED: tl.constexpr,
    E2M1: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """results[pair] = hidden[pair] @ down of its expert, COLUMNS f32."""
    launch_dependents(OVERLAPS)
    num_pairs = tl.load(dims + COUNT) * TOP_K
    wait_for_inputs(OVERLAPS)
    expert, pairs, found = block_of_pairs(
        tl.program_id(1), experts, counts, members, num_pairs,
        NUM_EXPERTS, EXPERTS_PAD, CAPACITY, BLOCK_M,
    )  # fmt: skip
    if found > 0:
        m = tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        OPERAND: tl.constexpr = hidden.dtype.element_ty
        column = tl.minimum(n, COLUMNS - 1) + expert.to(tl.int64) * COLUMNS
        sums = product(
            hidden + pairs.to(tl.int64) * DEPTH, m < found, down, down_scale, down_zero, column,
            DEPTH, GROUP, NIBBLES, SIGNED, TILES, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            E2M1, hidden_scale + pairs.to(tl.int64) * SCALES if SCALES > 1 else None, WEIGHTS_FIRST,
        )  # fmt: skip
        if down_scale_unit is not None:
            sums = sums * tl.load(down_scale_unit + column)[None, :]
        sums = times_one_scale(sums, hidden_scale, pairs, m < found, SCALES)
        if down_input_scale is not None:
            sums = sums * tl.load(down_input_scale + expert)
        if down_bias is not None:
            sums += tl.load(down_bias + column)[None, :]
        at = pairs.to(tl.int64)[:, None] * COLUMNS + n[None, :]
        tl.store(results + at, sums, mask=(m < found)[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def combine(
    results,
    shares,
    experts,
    shared,
    shared_gate,
    residual,
    dims,
    out,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED_STRIDE: tl.constexpr,
    SHARED_GATE_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if row < num_rows:
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(TOP_K):
            pair = row * TOP_K + rank
            is_here = inside
            if experts is not None:  # results of other ranks' experts were not written
                is_here = inside & (tl.load(experts + pair) >= 0)
            result = tl.load(results + pair * COLUMNS + column, mask=is_here, other=0.0)
            total += tl.load(shares + pair) * result
        if shared is not None:
            more = tl.load(shared + row * SHARED_STRIDE + column, mask=inside, other=0.0)
            more = more.to(tl.float32)
            if shared_gate is not None:
                logit = tl.load(shared_gate + row * SHARED_GATE_STRIDE)
                more = more / (1.0 + tl.exp(-logit))
            total += more
        if residual is not None:
            more = tl.load(residual + row * RESIDUAL_STRIDE + column, mask=inside, other=0.0)
            total += more.to(tl.float32)
        tl.store(out + row * OUT_STRIDE + column, total.to(out.dtype.element_ty), mask=inside)
