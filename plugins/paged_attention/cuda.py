"""paged_attention in one launch: ragged prefill chunks and decodes over a paged pool.

A program takes a tile of a sequence's new tokens for one KV head, all query heads of the group
stacked into the tile's rows, and walks the sequence's context in blocks of BLOCK_N keys with a
running maximum (tensor cores for both products, f32 sums):

    tile row m  ->  token m // GROUP_PAD of the tile, head m % GROUP_PAD of the group

Which tiles a sequence has is only known on the device. Tile numbers are given out so that sequence
b begins at query_start[b] // BLOCK_Q + b: that leaves every sequence room enough, and a program
finds its sequence by bisection. T // BLOCK_Q + B programs therefore cover any batch of T tokens.

Blocks of keys are anchored at position 0 whatever the chunk, so with one tile shape a row's result
does not depend on the rest of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from trtc.plugins.cuda.compile import KernelParameter, KernelSource


@dataclass(frozen=True)
class Tile:
    """Rows and keys that a program multiplies at once."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


DECODE, PREFILL = 1, 2
"""Tactics: few rows a sequence, or many."""
TACTICS = (DECODE, PREFILL)


@triton.jit
def paged_attention(
    q,
    pool,
    query_start,
    context_lens,
    page_table,
    k_scale,
    v_scale,
    num_sequences,
    table_width,
    out,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PAD
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    sequence = low
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    first_new = (tile - (first_row // BLOCK_Q + sequence)) * BLOCK_Q
    if first_new < num_new:
        context = tl.load(context_lens + sequence)
        by_k = tl.load(k_scale)
        by_v = tl.load(v_scale)

        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, HEAD_PAD)
        n = tl.arange(0, BLOCK_N)
        new = first_new + m // GROUP_PAD
        head = m % GROUP_PAD
        in_tile = (new < num_new) & (head < GROUP)
        in_head = d < HEAD_DIM
        row = (first_row + new).to(tl.int64)
        at = (row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head) * HEAD_DIM
        queries = tl.load(
            q + at[:, None] + d[None, :], mask=in_tile[:, None] & in_head[None, :], other=0.0
        )
        position = context - num_new + new

        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)

        tile_end = tl.minimum(first_new + BLOCK_Q, num_new)
        end = context - num_new + tile_end
        begin = 0
        if WINDOW > 0:
            earliest = tl.maximum(context - num_new + first_new - WINDOW + 1, 0)
            begin = earliest // BLOCK_N * BLOCK_N
        pages = page_table + tl.cast(sequence, tl.int64) * table_width
        for block in range(begin, end, BLOCK_N):
            key = block + n
            in_context = key < end
            page = tl.load(pages + key // PAGE_SIZE, mask=in_context, other=0).to(tl.int64)
            slot = (page * (2 * PAGE_SIZE) + key % PAGE_SIZE) * NUM_KV_HEADS + kv_head
            keys = tl.load(
                pool + slot[None, :] * HEAD_DIM + d[:, None],
                mask=in_context[None, :] & in_head[:, None],
                other=0.0,
            ).to(q.dtype.element_ty)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * (SCALE * by_k)
            if SOFTCAP > 0:
                # tanh(x) = 2 sigmoid(2 x) - 1
                scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
            seen = (key[None, :] <= position[:, None]) & in_context[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))

            new_largest = tl.maximum(largest, tl.max(scores, 1))
            # A row that has seen nothing yet (its window begins in a later block) stays at zero.
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(scores - reference[:, None])
            shrink = tl.exp2(largest - reference)
            total = total * shrink + tl.sum(weights, 1)
            values = tl.load(
                pool + (slot + PAGE_SIZE * NUM_KV_HEADS)[:, None] * HEAD_DIM + d[None, :],
                mask=in_context[:, None] & in_head[None, :],
                other=0.0,
            ).to(q.dtype.element_ty)
            weighted = weighted * shrink[:, None] + tl.dot(
                weights.to(q.dtype.element_ty), values, input_precision=PRECISION
            )
            largest = new_largest

        result = weighted / total[:, None] * by_v
        tl.store(
            out + at[:, None] + d[None, :],
            result.to(out.dtype.element_ty),
            mask=in_tile[:, None] & in_head[None, :],
        )


def tile_of(dtypes: Mapping[str, str], head_dim: int, group: int, tactic: int) -> Tile:
    """The tile of a tactic, small enough for the shared memory of every SM."""
    head_pad = max(16, triton.next_power_of_2(head_dim))
    group_pad = triton.next_power_of_2(group)
    if dtypes["q"] == "f32":
        block_m = 16 if tactic == DECODE or head_pad > 128 else 32
        return Tile(max(block_m, group_pad), 16, num_warps=4, num_stages=1)
    block_m = 16 if tactic == DECODE else 64 if head_pad <= 128 else 32
    stages = 2 if head_pad <= (128 if tactic == DECODE else 64) else 1
    block_n = 64 if head_pad <= 64 else 32
    return Tile(max(block_m, group_pad), block_n, num_warps=4, num_stages=stages)


def kernel(
    dtypes: Mapping[str, str],
    attributes: Mapping[str, int | float | str],
    page_size: int,
    tactic: int,
) -> KernelSource:
    """The kernel of one node. Grid: (T // block_q + B, num_kv_heads, 1); see `block_q`.

    Args:
        dtypes: element types of `q` and `pool`.
        attributes: of the operator, complete.
        tactic: DECODE or PREFILL; both are right for every batch.
    """
    head_dim, num_kv_heads = int(attributes["head_dim"]), int(attributes["num_kv_heads"])
    group = int(attributes["num_heads"]) // num_kv_heads
    tile = tile_of(dtypes, head_dim, group, tactic)
    return KernelSource(
        function=paged_attention,
        parameters=(
            KernelParameter("q", dtypes["q"]),
            KernelParameter("pool", dtypes["pool"]),
            KernelParameter("query_start", "i32"),
            KernelParameter("context_lens", "i32"),
            KernelParameter("page_table", "i32"),
            KernelParameter("k_scale", "f32"),
            KernelParameter("v_scale", "f32"),
            KernelParameter("num_sequences", "i32", is_pointer=False),
            KernelParameter("table_width", "i32", is_pointer=False),
            KernelParameter("out", dtypes["q"]),
        ),
        constants={
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "GROUP_PAD": triton.next_power_of_2(group),
            "HEAD_DIM": head_dim,
            "HEAD_PAD": max(16, triton.next_power_of_2(head_dim)),
            "PAGE_SIZE": page_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "SCALE": float(attributes["scale"]),
            "WINDOW": int(attributes["window"]),
            "SOFTCAP": float(attributes["softcap"]),
            "PRECISION": "ieee",
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def block_q(source: KernelSource) -> int:
    """New tokens of a sequence that one program takes."""
    return int(source.constants["BLOCK_M"]) // int(source.constants["GROUP_PAD"])
