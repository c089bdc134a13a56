"""Attention of a tile of queries to the latents of a sequence, in Triton.

A tile is some new tokens of a sequence times some heads. A block of latents is read once, for
scores and as values:

    tile row m  ->  token m // HEADS of the tile, head m % HEADS of the program's

Blocks are anchored at position 0 whatever the chunk, as in plugins/attention/triton.py.
"""

import triton
import triton.language as tl


@triton.jit
def attend_latents(
    q,
    row,
    is_row,
    position,
    begin,
    end,
    pool,
    pages,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The softmax over latents [begin, end), not yet divided: (largest score times log2(e), sum of
    weights, weighted sum of latents [rows, RANK_PAD]).

    Args:
        q: queries; `row` are the offsets of the tile's.
        position: of each row's token.
        begin: a multiple of BLOCK_N, of which every row sees the first latent.
        end: latents that any row sees.
        pages: of the sequence.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    BLOCK_M: tl.constexpr = position.shape[0]
    DTYPE: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, RANK_PAD)
    turned = tl.arange(0, ROPE_PAD)
    n = tl.arange(0, BLOCK_N)
    in_rank = (column < RANK)[None, :]
    in_rope = (turned < ROPE)[None, :]
    plain = tl.load(q + row[:, None] + column[None, :], mask=is_row[:, None] & in_rank, other=0.0)
    rotated = tl.load(
        q + row[:, None] + RANK + turned[None, :], mask=is_row[:, None] & in_rope, other=0.0
    )
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    for block in range(begin, end, BLOCK_N):
        key = block + n
        live = key < end
        page = tl.load(pages + key // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        place = pool + (page * PAGE_SIZE + key % PAGE_SIZE) * (RANK + ROPE)
        latents = tl.load(
            place[:, None] + column[None, :], mask=live[:, None] & in_rank, other=0.0
        ).to(DTYPE)
        keys = tl.load(
            place[:, None] + RANK + turned[None, :], mask=live[:, None] & in_rope, other=0.0
        ).to(DTYPE)
        scores = tl.dot(rotated, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(plain, tl.trans(latents), scores, input_precision="ieee")
        seen = (key[None, :] <= position[:, None]) & live[None, :]
        scores = tl.where(seen, scores * (SCALE * LOG2_E), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(DTYPE), latents, weighted, input_precision="ieee")
        largest = new_largest
    return largest, total, weighted
