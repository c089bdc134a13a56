"""Causal attention over a paged KV pool, one token and head at a time."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import quantize

Array = NDArray[np.generic]
Floats = NDArray[np.float32]


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
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    softcap: float,
    out_dtype: str,
) -> tuple[Array]:
    """Return quantize(softmax(q . K * scale) . V) for each of the step's tokens.

    Sequence b owns rows query_start[b] to query_start[b+1], the last positions of its context.
    """
    out = np.zeros((q.shape[0], num_heads, head_dim), np.float32)
    group = num_heads // num_kv_heads
    for sequence, context in enumerate(int(length) for length in context_lens):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        if begin == end:
            continue
        keys, values = _context(pool, page_table[sequence], context, k_scale, v_scale)
        for row in range(begin, end):
            position = context - (end - row)
            first = max(0, position - window + 1) if window else 0
            queries = q[row].astype(np.float32).reshape(num_heads, head_dim)
            for head in range(num_heads):
                seen = slice(first, position + 1)
                scores = keys[seen, head // group] @ queries[head] * np.float32(scale)
                if softcap:
                    scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[seen, head // group] / weights.sum()
    flat = out.reshape(q.shape[0], num_heads * head_dim)
    return (quantize(flat, pre_scale, out_scale, out_dtype, through=str(q.dtype)),)


def _context(
    pool: Array, pages: Array, context: int, k_scale: Array | None, v_scale: Array | None
) -> tuple[Floats, Floats]:
    """Keys and values [context, kv_heads, head_dim] of a sequence, in order of position."""
    positions = np.arange(context)
    page_size = pool.shape[2]
    found = pool[pages[positions // page_size], :, positions % page_size].astype(np.float32)
    keys, values = found[:, 0], found[:, 1]
    if k_scale is not None:
        keys = keys * k_scale.astype(np.float32)
    if v_scale is not None:
        values = values * v_scale.astype(np.float32)
    return keys, values
