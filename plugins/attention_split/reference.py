"""Causal attention over a paged KV pool, with separate results for the splits of a long context."""

import math
from itertools import product

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.attention.reference import read_context, weighted_values
from trtc.plugins.attention.split_kv import TENSORRT, first_seen
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]
_LOG2_E = np.float32(math.log2(math.e))


def reference(
    q: Array,
    pool: Array,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    chunked: int,
    softcap: float,
    splits: int,
    out_dtype: str,
) -> tuple[Array, Array, Array]:
    """Return (out, partial, stats); see op.py. What is not defined there is zero.

    Sequence b owns rows query_start[b] to query_start[b+1], the last positions of its context.
    """
    num_rows, num_sequences = len(q), len(context_lens)
    out = np.zeros((num_rows, num_heads, head_dim), np.float32)
    partial = np.zeros((num_sequences, splits, num_heads, head_dim), np.float32)
    stats = np.zeros((num_sequences, splits, num_heads, 2), np.float32)
    queries = q.astype(np.float32).reshape(num_rows, num_heads, head_dim)
    for sequence, context in enumerate(int(length) for length in context_lens):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        keys, values = read_context(pool, head_dim, page_table[sequence], context, k_scale, v_scale)
        ranges = (
            TENSORRT.ranges(context, window, splits, chunked=bool(chunked))
            if end - begin == 1
            else []
        )
        for row, head in product(range(begin, end), range(num_heads)):
            kv_head, position = head // (num_heads // num_kv_heads), context - (end - row)
            first = first_seen(position, window, chunked=bool(chunked))
            for number, (least, past) in enumerate(ranges or [(0, position + 1)]):
                seen = slice(max(first, least), past)
                largest, total, summed = weighted_values(
                    queries[row, head], keys[seen, kv_head], values[seen, kv_head], scale, softcap
                )
                if len(ranges) > 1:
                    partial[sequence, number, head] = summed
                    stats[sequence, number, head] = largest * _LOG2_E, total
                else:
                    out[row, head] = summed / total
    return (
        cast(cast(out.reshape(num_rows, -1), str(q.dtype)), out_dtype),
        partial.reshape(num_sequences, -1),
        stats.reshape(num_sequences, -1),
    )
