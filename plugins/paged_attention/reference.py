"""Causal attention over a paged KV pool, one token and head at a time."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.attention.reference import read_context, weighted_values
from trtc.plugins.attention.split_kv import first_seen
from trtc.plugins.kv_pool import PagedHeads
from trtc.plugins.rounding import quantize

Array = NDArray[np.generic]


def reference(
    q: Array,
    pool: Array,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    pre_scale: Array | None,
    out_scale: Array | None,
    sinks: Array | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    chunked: int,
    softcap: float,
    out_dtype: str,
) -> tuple[Array]:
    """Return quantize(softmax(q . K * scale) . V) for each of the step's tokens.

    With sinks, the softmax is over a row's scores and its head's sink, which has no value.

    Sequence b owns rows query_start[b] to query_start[b+1], the last positions of its context.
    """
    out = np.zeros((q.shape[0], num_heads, head_dim), np.float32)
    group = num_heads // num_kv_heads
    turned = PagedHeads(pool, head_dim).queries(q.reshape(-1, num_heads, head_dim))
    for sequence, context in enumerate(int(length) for length in context_lens):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        if begin == end:
            continue
        keys, values = read_context(pool, head_dim, page_table[sequence], context, k_scale, v_scale)
        for row in range(begin, end):
            position = context - (end - row)
            first = first_seen(position, window, chunked=bool(chunked))
            queries = turned[row]
            for head in range(num_heads):
                seen = slice(first, position + 1)
                kv_head = head // group
                _, total, summed = weighted_values(
                    queries[head],
                    keys[seen, kv_head],
                    values[seen, kv_head],
                    scale,
                    softcap,
                    sink=None if sinks is None else np.float32(sinks[head]),
                )
                out[row, head] = summed / total
    flat = out.reshape(q.shape[0], num_heads * head_dim)
    return (quantize(flat, pre_scale, out_scale, out_dtype, through=str(q.dtype)),)
