"""The KV pool as operators see it: a region of the cache layout, in the shape of one entry."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.op import Parameter
from trtc.plugins.rounding import cast, quantize_rows

POOL_AXES = ("num_pages", "planes", "page_size", "num_kv_heads", "head_dim+scale_bytes")
"""Plane 0 holds keys, plane 1 values. With scales (i8: 4 scale_bytes, else 0) a plane of a page has
the codes of its tokens, [page_size, num_kv_heads, head_dim], and behind them the f32 scale of each
head, [page_size, num_kv_heads]."""
POOL_DTYPES = ("f32", "bf16", "f8e4m3", "i8")
POOL = Parameter("pool", POOL_AXES, POOL_DTYPES, role="pool")
POOL_OUT = Parameter("pool_out", POOL_AXES, POOL_DTYPES, role="pool")
LATENT_POOL_AXES = ("num_pages", "planes", "page_size", "latents", "width")
"""One plane with one latent of each token: `rank` elements, and those of the keys that rope turns
behind them."""
LATENT_POOL_DTYPES = ("f32", "bf16", "f8e4m3")
LATENT_POOL = Parameter("pool", LATENT_POOL_AXES, LATENT_POOL_DTYPES, role="pool")
LATENT_POOL_OUT = Parameter("pool_out", LATENT_POOL_AXES, LATENT_POOL_DTYPES, role="pool")
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
SCAN_AXES = ("num_pages", "1", "state_size*channels")
"""A selective scan's state: a row of all channels for each of its elements."""
SCAN_STATE = Parameter("state", SCAN_AXES, ("f32",), role="pool")
SCAN_STATE_OUT = Parameter("state_out", SCAN_AXES, ("f32",), role="pool")


class PagedHeads:
    """The keys and values of a pool with POOL_AXES, for references: views of it.

    `codes` is [num_pages, planes, page_size, num_kv_heads, head_dim], `scales` the same without
    head_dim, or None where heads have none.
    """

    def __init__(self, pool: NDArray[Any], head_dim: int) -> None:
        pages, planes, page_size, heads, stored = pool.shape
        self._dtype = str(pool.dtype)
        self._page_size = page_size
        flat = pool.reshape(pages, planes, page_size * heads * stored)
        codes = page_size * heads * head_dim
        self.codes = flat[:, :, :codes].reshape(pages, planes, page_size, heads, head_dim)
        self.scales: NDArray[np.float32] | None = None
        if stored > head_dim:
            scales = flat[:, :, codes:].view(np.float32)
            self.scales = scales.reshape(pages, planes, page_size, heads)
        assert np.shares_memory(self.codes, pool)

    def read(self, slots: NDArray[Any]) -> NDArray[np.float32]:
        """[slots, planes, heads, head_dim], without the scales of a checkpoint."""
        pages, offsets = np.divmod(slots, self._page_size)
        found: NDArray[np.float32] = self.codes[pages, :, offsets].astype(np.float32)
        if self.scales is not None:
            found = found * self.scales[pages, :, offsets][..., None]
        return found

    def write(self, plane: int, slots: NDArray[Any], heads: NDArray[np.float32]) -> None:
        """Round [slots, heads, head_dim]; with scales, to int8 by each head's largest magnitude,
        and a head that is not finite has the scale NaN."""
        pages, offsets = np.divmod(slots, self._page_size)
        stored: NDArray[Any] = heads
        if self.scales is not None:
            rows = heads.reshape(-1, heads.shape[-1])
            codes, scales = quantize_rows(np.nan_to_num(rows, posinf=0, neginf=0), 1, "i8")
            scales[~np.isfinite(rows).all(axis=1)] = np.nan
            stored = codes.reshape(heads.shape)
            self.scales[pages, plane, offsets] = scales.reshape(heads.shape[:-1])
        self.codes[pages, plane, offsets] = cast(stored, self._dtype)


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
