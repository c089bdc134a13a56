"""Combines partial softmax sums over the splits of a row's keys."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.attention.split_kv import TENSORRT
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    rows: Array,
    partial: NDArray[np.float32],
    stats: NDArray[np.float32],
    query_start: Array,
    context_lens: Array,
    *,
    num_heads: int,
    head_dim: int,
    window: int,
    chunked: int,
    splits: int,
) -> tuple[Array]:
    """Return rows, but sum(partial * 2^largest) / sum(total * 2^largest) where a row was split.

    Those are the only rows of sequences that fell into several splits; see attention_split.
    """
    out = rows.copy()
    num_sequences = len(context_lens)
    partial = partial.reshape(num_sequences, splits, num_heads, head_dim)
    stats = stats.reshape(num_sequences, splits, num_heads, 2)
    for sequence, context in enumerate(int(length) for length in context_lens):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        count = len(TENSORRT.ranges(context, window, splits, chunked=bool(chunked)))
        if end - begin != 1 or count == 1:
            continue
        largest, totals = stats[sequence, :count, :, 0], stats[sequence, :count, :, 1]
        factors = np.exp2(largest - largest.max(axis=0))
        summed = (factors[..., None] * partial[sequence, :count]).sum(axis=0)
        row = summed / (factors * totals).sum(axis=0)[:, None]
        out[begin] = cast(row.reshape(-1), str(rows.dtype))
    return (out,)
