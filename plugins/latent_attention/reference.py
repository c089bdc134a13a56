"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434), one token and
head at a time."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.attention.reference import weighted_values
from trtc.plugins.latents.expansion import expanded_sequences
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    q: Array,
    pool: Array,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    selected: Array | None,
    *,
    num_heads: int,
    rank: int,
    scale: float,
    least_new: int,
    room: int,
    most_context: int,
) -> tuple[Array]:
    """Return softmax(q . latents * scale) . latents[:rank] for each of the step's tokens, and zeros
    for those of sequences that are expanded.

    `selected` [M, top_k] has the slots that a token attends to if it sees more than top_k.
    Sequence b owns rows query_start[b] to query_start[b+1], the last positions of its context.
    """
    page_size, width = pool.shape[2], pool.shape[4]
    out = np.zeros((q.shape[0], num_heads, rank), np.float32)
    elsewhere = set(expanded_sequences(query_start, context_lens, least_new, room, most_context))
    for sequence, context in enumerate(int(length) for length in context_lens):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        if begin == end or sequence in elsewhere:
            continue
        positions = np.arange(context)
        pages = page_table[sequence][positions // page_size]
        latents = pool[pages, 0, positions % page_size, 0].astype(np.float32)
        for row in range(begin, end):
            seen = latents[: context - (end - row) + 1]
            if selected is not None and len(seen) > selected.shape[1]:
                pages, offsets = np.divmod(selected[row], page_size)
                seen = pool[pages, 0, offsets, 0].astype(np.float32)
            queries = q[row].astype(np.float32).reshape(num_heads, width)
            for head in range(num_heads):
                _, total, summed = weighted_values(
                    queries[head], seen, seen[:, :rank], scale, softcap=0.0
                )
                out[row, head] = summed / total
    return (cast(out.reshape(q.shape[0], num_heads * rank), str(q.dtype)),)
