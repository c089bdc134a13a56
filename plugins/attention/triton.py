"""Attention of one tile, for the Triton kernels of paged_attention and attention_split.

A tile is some new tokens of a sequence for one KV head, all query heads of the group stacked into
its rows; it walks the sequence's context in blocks of BLOCK_N keys with a running maximum (tensor
cores for both products, f32 sums):

    tile row m  ->  token m // GROUP_PAD of the tile, head m % GROUP_PAD of the group

Which tiles a sequence has is only known on the device. Tile numbers are given out so that sequence
b begins at query_start[b] // BLOCK_Q + b: that leaves every sequence room enough, and a program
finds its sequence by bisection. T // BLOCK_Q + B programs therefore cover any batch of T tokens.

Blocks of keys are anchored at position 0 whatever the chunk, and masking a key changes no bit of a
sum, so with one tile shape a row's result does not depend on the rest of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.packed_heads.triton import turned_queries, unpacked


@dataclass(frozen=True)
class Tile:
    """Rows and keys that a program multiplies at once."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_head(head_dim: int) -> int:
    """Channels of a head in a tile."""
    return max(16, power_of_two(head_dim))


def tile_constants(
    attributes: Mapping[str, int | float | str],
    *,
    head_dim: int,
    num_kv_heads: int,
    stored_width: int,
    page_size: int,
    tile: Tile,
) -> dict[str, int | float]:
    """Constants of every kernel that takes tiles.

    Args:
        attributes: of the operator: num_heads, scale, window, chunked and softcap.
        stored_width: elements of the pool that a head takes (plugins/kv_pool.py).
    """
    group = int(attributes["num_heads"]) // num_kv_heads
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_PAD": power_of_two(group),
        "HEAD_DIM": head_dim,
        "STORED": stored_width,
        "HEAD_PAD": padded_head(head_dim),
        "PAGE_SIZE": page_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SCALE": float(attributes["scale"]),
        "WINDOW": int(attributes["window"]),
        "CHUNKED": bool(attributes["chunked"]),
        "SOFTCAP": float(attributes["softcap"]),
    }


@triton.jit
def find_sequence(tile, query_start, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that a tile number belongs to, and the first of its new tokens in the tile."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    first_row = tl.load(query_start + low)
    return low, (tile - (first_row // BLOCK_Q + low)) * BLOCK_Q


@triton.jit
def attend(
    queries,
    position,
    first_position,
    end,
    pool,
    pages,
    kv_head,
    scale,
    sink,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """softmax(queries . K * scale) . V of [rows, HEAD_PAD] queries, f32.

    Args:
        position: of each row's token.
        first_position: the least of them.
        end: keys that any of them sees.
        pages: of the sequence.
        sink: of each row's head, one more score of its softmax without a value; or None.
    """
    if pool.dtype.element_ty == tl.uint8:
        queries = turned_queries(queries, HEAD_DIM & -HEAD_DIM)
    begin = first_key(first_position, WINDOW, CHUNKED, BLOCK_N)
    _, total, weighted = attend_keys(
        queries, position, first_position, begin, end, pool, pages, kv_head, scale, sink,
        NUM_KV_HEADS, HEAD_DIM, STORED, PAGE_SIZE, BLOCK_N, WINDOW, CHUNKED,
        SOFTCAP, PRECISION,
    )  # fmt: skip
    return weighted / total[:, None]


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The first key that a token sees, rounded down."""
    if WINDOW > 0:
        first = tl.maximum(first_seen(position, WINDOW, CHUNKED), 0)
        return first // ALIGNMENT * ALIGNMENT
    return 0


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Twin of plugins/attention/split_kv.py; below 0 where a window begins before the context."""
    if CHUNKED:
        return position - position % WINDOW
    return position - WINDOW + 1


@triton.jit
def splits_of(
    context,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Twin of plugins/attention/split_kv.py: (first key, keys of a split, number of splits)."""
    first = first_key(context - 1, WINDOW, CHUNKED, ALIGNMENT)
    blocks = (context - first + SPLITS * ALIGNMENT - 1) // (SPLITS * ALIGNMENT)
    length = tl.maximum(blocks * ALIGNMENT, SPLIT_KEYS)
    return first, length, (context - first + length - 1) // length


@triton.jit
def attend_keys(
    queries,
    position,
    first_position,
    begin,
    end,
    pool,
    pages,
    kv_head,
    scale,
    sink,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The softmax over keys [begin, end), not yet divided: (largest score times log2(e), sum of
    weights, weighted sum of values).

    Args:
        queries: turned already, where keys are.
        begin: a multiple of BLOCK_N, at most first_position.
        end: a multiple of BLOCK_N, or all keys that any row sees.
        sink: as of `attend`.
    """
    BLOCK_M: tl.constexpr = queries.shape[0]
    HEAD_PAD: tl.constexpr = queries.shape[1]
    if sink is None:
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        largest = sink * 1.4426950408889634  # log2(e): the largest score so far
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    weighted = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    masked = begin
    if WINDOW == 0:
        masked = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)
    largest, total, weighted = _attend_blocks(
        largest, total, weighted, queries, position, first_position, begin, masked, end,
        pool, pages, kv_head, scale, NUM_KV_HEADS, HEAD_DIM, STORED, PAGE_SIZE, BLOCK_N,
        WINDOW, CHUNKED, SOFTCAP, PRECISION, MASKED=False,
    )  # fmt: skip
    return _attend_blocks(
        largest, total, weighted, queries, position, first_position, masked, end, end,
        pool, pages, kv_head, scale, NUM_KV_HEADS, HEAD_DIM, STORED, PAGE_SIZE, BLOCK_N,
        WINDOW, CHUNKED, SOFTCAP, PRECISION, MASKED=True,
    )  # fmt: skip


@triton.jit
def _attend_blocks(
    largest,
    total,
    weighted,
    queries,
    position,
    first_position,
    begin,
    stop,
    end,
    pool,
    pages,
    kv_head,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax after keys [begin, stop); every row sees them all unless MASKED."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    HEAD_PAD: tl.constexpr = queries.shape[1]
    PLANE: tl.constexpr = PAGE_SIZE * NUM_KV_HEADS * STORED
    PACKED: tl.constexpr = pool.dtype.element_ty == tl.uint8
    CODES: tl.constexpr = HEAD_DIM // 2 if PACKED else HEAD_DIM
    d = tl.arange(0, HEAD_PAD // 2 if PACKED else HEAD_PAD)
    n = tl.arange(0, BLOCK_N)
    in_head = d < CODES
    # Scores are multiplied where their largest is subtracted: masked or not, the same bits.
    factor = 1.0 if SOFTCAP > 0 else scale * LOG2_E
    for block in range(begin, stop, BLOCK_N):
        key = block + n
        live = key < end if MASKED else key >= 0
        if WINDOW > 0:
            # Pages that the window has left are others' by now, and may hold anything.
            live = live & (key >= first_seen(first_position, WINDOW, CHUNKED))
        page = tl.load(pages + key // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        place = key % PAGE_SIZE * NUM_KV_HEADS + kv_head
        row = pool + page * (2 * PLANE) + place * CODES
        if PACKED:
            codes = tl.load(
                row[:, None] + d[None, :], mask=live[:, None] & in_head[None, :], other=0
            )
            keys = tl.trans(unpacked(codes, queries.dtype))
        else:
            keys = tl.load(
                row[None, :] + d[:, None],
                mask=live[None, :] & in_head[:, None],
                other=0.0,
            ).to(queries.dtype)
        scores = tl.dot(queries, keys, input_precision=PRECISION)
        if STORED > CODES:
            behind = pool + page * (2 * PLANE) + PAGE_SIZE * NUM_KV_HEADS * CODES
            key_scales = behind.to(tl.pointer_type(tl.float32)) + place
            scores = scores * tl.load(key_scales, mask=live, other=0.0)[None, :]
        if SOFTCAP > 0:
            # tanh(x) = 2 sigmoid(2 x) - 1
            capped = 2.0 * tl.sigmoid(2.0 * (scores * scale) / SOFTCAP) - 1.0
            scores = capped * (SOFTCAP * LOG2_E)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & live[None, :]
            if WINDOW > 0:
                first = first_seen(position, WINDOW, CHUNKED)
                seen = seen & (key[None, :] >= first[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet (its window begins in a later block) stays at zero.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(tl.fma(scores, factor, -reference[:, None]))
        shrink = tl.exp2(largest - reference)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        stored = tl.load(
            (row + PLANE)[:, None] + d[None, :],
            mask=live[:, None] & in_head[None, :],
            other=0.0,
        )
        values = unpacked(stored, queries.dtype) if PACKED else stored.to(queries.dtype)
        if STORED > CODES:
            value_scales = (behind + PLANE).to(tl.pointer_type(tl.float32)) + place
            weights = weights * tl.load(value_scales, mask=live, other=0.0)[None, :]
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(queries.dtype), values, weighted, input_precision=PRECISION)
        largest = new_largest
    return largest, total, weighted
