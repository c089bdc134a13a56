"""Multi-head latent attention with keys and values of every head (DeepSeek-V2, arXiv:2405.04434),
one token and head at a time."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.attention.reference import weighted_values
from trtc.plugins.latents.expansion import expanded_sequences
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    attended: Array,
    q: Array,
    pool: Array,
    keys: Array,
    values: Array,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    *,
    num_heads: int,
    head_dim: int,
    scale: float,
    least_new: int,
    room: int,
    most_context: int,
) -> tuple[Array]:
    """Return `attended` with the rows of the sequences that are expanded replaced.

    Shapes: attended [M, num_heads * value_dim], q [M, num_heads * head_dim], keys
    [num_heads, rank, nope], values [num_heads, value_dim, rank]. A head's key of a token is
    latent[:rank] @ keys[head], followed by latent[rank:]; its value is values[head] @
    latent[:rank]. Sequence b owns rows query_start[b] to query_start[b+1], the last positions of
    its context.
    """
    page_size, rank = pool.shape[2], keys.shape[1]
    out = attended.astype(np.float32).reshape(len(q), num_heads, -1)
    for sequence in expanded_sequences(query_start, context_lens, least_new, room, most_context):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        context = int(context_lens[sequence])
        positions = np.arange(context)
        pages = page_table[sequence][positions // page_size]
        latents = pool[pages, 0, positions % page_size, 0].astype(np.float32)
        for head in range(num_heads):
            plain = latents[:, :rank] @ keys[head].astype(np.float32)
            their_keys = np.concatenate((plain, latents[:, rank:]), axis=1)
            their_values = latents[:, :rank] @ values[head].astype(np.float32).T
            for row in range(begin, end):
                seen = context - (end - row) + 1
                query = q[row].astype(np.float32).reshape(num_heads, head_dim)[head]
                _, total, summed = weighted_values(
                    query, their_keys[:seen], their_values[:seen], scale, softcap=0.0
                )
                out[row, head] = summed / total
    return (cast(out.reshape(attended.shape), str(attended.dtype)),)
