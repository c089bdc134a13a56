"""The lightning indexer's choice (DeepSeek-V3.2, arXiv:2512.02556), one token at a time."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def reference(
    q: Array,
    weights: Array,
    pool: Array,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    *,
    num_heads: int,
    top_k: int,
    max_context: int,
) -> tuple[Array]:
    """Return the slots of the tokens that each of the step's tokens selects, [M, top_k].

    Of equal scores the earlier token's counts as larger, and one that is not a number as the
    smallest. Sequence b owns rows query_start[b] to query_start[b+1], the last positions of its
    context.
    """
    page_size, width = pool.shape[2], pool.shape[4]
    selected = np.full((len(q), top_k), -1, np.int32)
    for sequence, context in enumerate(int(length) for length in context_lens):
        assert context <= max_context
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        positions = np.arange(context)
        pages, offsets = page_table[sequence][positions // page_size], positions % page_size
        keys = pool[pages, 0, offsets, 0].astype(np.float32)
        slots = pages * page_size + offsets
        for row in range(begin, end):
            seen = context - (end - row) + 1
            chosen = positions[:seen]
            if seen > top_k:
                queries = q[row].astype(np.float32).reshape(num_heads, width)
                scores = weights[row] @ np.maximum(queries @ keys[:seen].T, 0)
                chosen = np.sort(np.argsort(-scores, kind="stable")[:top_k])
            selected[row, : len(chosen)] = slots[chosen]
    return (selected,)
