"""The KV pool as operators see it: a region of the cache layout, in the shape of one entry."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.op import Parameter

POOL_AXES = ("num_pages", "planes", "page_size", "num_kv_heads", "head_dim")
"""Plane 0 holds keys, plane 1 values."""
POOL_DTYPES = ("f32", "bf16", "f8e4m3")
POOL = Parameter("pool", POOL_AXES, POOL_DTYPES, role="pool")
POOL_OUT = Parameter("pool_out", POOL_AXES, POOL_DTYPES, role="pool")
LATENT_POOL_AXES = ("num_pages", "planes", "page_size", "latents", "width")
"""One plane with one latent of each token: `rank` elements, and those of the keys that rope turns
behind them."""
LATENT_POOL = Parameter("pool", LATENT_POOL_AXES, POOL_DTYPES, role="pool")
LATENT_POOL_OUT = Parameter("pool_out", LATENT_POOL_AXES, POOL_DTYPES, role="pool")
STATE_AXES = ("num_pages", "columns", "channels")
"""A convolution's state: its latest inputs, oldest first."""
STATE_DTYPES = ("f32", "bf16")
STATE = Parameter("state", STATE_AXES, STATE_DTYPES, role="pool")
STATE_OUT = Parameter("state_out", STATE_AXES, STATE_DTYPES, role="pool")
MATRIX_AXES = ("num_pages", "value_heads", "key_dim*value_dim")
"""A delta net's state: a matrix of each head, row by row."""
MATRIX = Parameter("state", MATRIX_AXES, ("f32",), role="pool")
MATRIX_OUT = Parameter("state_out", MATRIX_AXES, ("f32",), role="pool")
SSM_AXES = ("num_pages", "heads", "state_size*head_dim")
"""A state-space layer's state: a matrix of each head, row by row."""
SSM_STATE = Parameter("state", SSM_AXES, ("f32",), role="pool")
SSM_STATE_OUT = Parameter("state_out", SSM_AXES, ("f32",), role="pool")


class Rows(NamedTuple):
    """The rows of a step, as an operator with a state is given them."""

    query_start: NDArray[np.generic]
    context_lens: NDArray[np.generic]
    page_table: NDArray[np.generic]
    slots: NDArray[np.generic]


def step_rows(rows: Rows, page_size: int) -> Iterator[tuple[int, int | None, int]]:
    """Each row of a step in order, for references: its number, the page with the state that it
    goes on from, and the page where it leaves its own. None: it is a sequence's first token.

    A sequence goes on from the page that its table has for the token before its first new one.
    What each token leaves goes to the page of its slot, where that of the next one may replace it.
    A sequence of one token may go on from what the row before it leaves in this step: a draft.
    """
    for sequence, length in enumerate(int(n) for n in rows.context_lens):
        begin, end = (int(row) for row in rows.query_start[sequence : sequence + 2])
        start = length - (end - begin)
        page = int(rows.page_table[sequence][(start - 1) // page_size]) if start > 0 else None
        for row in range(begin, end):
            after = int(rows.slots[row]) // page_size
            yield row, page, after
            page = after
