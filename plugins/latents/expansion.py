"""Which sequences of a step attend to expanded keys and values instead of to latents.

Expanding a latent costs head_dim + value_dim products of its rank for each head, however many new
tokens read it; attending in the absorbed form costs each of them the rank instead of the heads' own
sizes. So prompts are expanded, and sequences with few new tokens are not. The buffer of expanded
keys and values has room for so many tokens; a sequence that it has no room for stays absorbed.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

LEAST_NEW = 128
"""New tokens from which on expanding pays: at DeepSeek-V2-Lite's sizes it costs as much as what it
saves for 104 tokens."""
ALIGNMENT = 128
"""A sequence begins at a multiple of so many tokens of the buffer."""
MAX_BYTES = 1 << 30
"""Of the buffer, for all heads of a layer."""


def room_for(token_bytes: int, max_seq_len: int, max_num_tokens: int) -> int:
    """Tokens of the buffer: the longest sequence, or a step's prompts however they are aligned."""
    wanted = max(max_seq_len, 2 * max_num_tokens)
    return min(-(-wanted // ALIGNMENT), MAX_BYTES // token_bytes // ALIGNMENT) * ALIGNMENT


def expanded_sequences(
    query_start: NDArray[np.generic],
    context_lens: NDArray[np.generic],
    least_new: int,
    room: int,
    most_context: int,
) -> Iterator[int]:
    """Those with `least_new` new tokens or more, in their order while there is room.

    Args:
        least_new: 0: none.
        most_context: of a sequence, whose tokens attend to all that they see; 0: any.
    """
    taken = 0
    for sequence, context in enumerate(int(length) for length in context_lens):
        new = int(query_start[sequence + 1]) - int(query_start[sequence])
        if least_new and new >= least_new and not 0 < most_context < context:
            taken += -(-context // ALIGNMENT) * ALIGNMENT
            if taken > room:
                return
            yield sequence
