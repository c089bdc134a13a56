"""The KV pool as operators see it: a region of the cache layout, in the shape of one entry."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.four_bits import hadamard_block, packed, signed_scales, unpacked
from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.op import Parameter
from trtc.plugins.rounding import cast, quantize_rows

POOL_AXES = ("num_pages", "planes", "page_size", "num_kv_heads", "stored_width")
"""Plane 0 holds keys, plane 1 values. With scales (i8, u8) a plane of a page has the codes of its
tokens, [page_size, num_kv_heads, code_width], and behind them the f32 scale of each head,
[page_size, num_kv_heads]; stored_width counts both.

u8 are codes of 4 bits (plugins/four_bits.py), whose keys are turned, and with them queries."""
POOL_DTYPES = ("f32", "bf16", "f8e4m3", "i8", "u8")
POOL = Parameter("pool", POOL_AXES, POOL_DTYPES, role="pool")
POOL_OUT = Parameter("pool_out", POOL_AXES, POOL_DTYPES, role="pool")
LATENT_POOL_AXES = ("num_pages", "planes", "page_size", "latents", "width")
"""One plane with one latent of each token: `rank` elements, and those of the keys that rope turns
behind them."""
LATENT_POOL_DTYPES = ("f32", "bf16", "f8e4m3")
LATENT_POOL = Parameter("pool", LATENT_POOL_AXES, LATENT_POOL_DTYPES, role="pool")
LATENT_POOL_OUT = Parameter("pool_out", LATENT_POOL_AXES, LATENT_POOL_DTYPES, role="pool")
INDEX_POOL_AXES = ("num_pages", "planes", "page_size", "index_keys", "width")
"""One plane with one key of each token, by which attention's tokens are selected."""
INDEX_POOL = Parameter("pool", INDEX_POOL_AXES, LATENT_POOL_DTYPES, role="pool")
INDEX_POOL_OUT = Parameter("pool_out", INDEX_POOL_AXES, LATENT_POOL_DTYPES, role="pool")
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


def code_width(dtype: str, head_dim: int) -> int:
    """Elements of a pool of `dtype` that the codes of a head take."""
    return head_dim // 2 if dtype == "u8" else head_dim


class PagedHeads:
    """The keys and values of a pool with POOL_AXES, for references: views of it.

    `codes` is [num_pages, planes, page_size, num_kv_heads, code_width], `scales` the same without
    the last, or None where heads have none.
    """

    def __init__(self, pool: NDArray[Any], head_dim: int) -> None:
        pages, planes, page_size, heads, stored = pool.shape
        self._dtype = str(pool.dtype)
        self._page_size = page_size
        flat = pool.reshape(pages, planes, page_size * heads * stored)
        self._head_dim = head_dim
        self._is_packed = self._dtype == "uint8"
        width = code_width("u8" if self._is_packed else self._dtype, head_dim)
        codes = page_size * heads * width
        self.codes = flat[:, :, :codes].reshape(pages, planes, page_size, heads, width)
        self.scales: NDArray[np.float32] | None = None
        if stored > width:
            scales = flat[:, :, codes:].view(np.float32)
            self.scales = scales.reshape(pages, planes, page_size, heads)
        assert np.shares_memory(self.codes, pool)

    def read(self, slots: NDArray[Any]) -> NDArray[np.float32]:
        """[slots, planes, heads, head_dim], without the scales of a checkpoint: what `queries` are
        multiplied by, and the values."""
        pages, offsets = np.divmod(slots, self._page_size)
        scales = None if self.scales is None else self.scales[pages, :, offsets]
        return self._numbers(self.codes[pages, :, offsets], scales)

    def read_all(self) -> NDArray[np.float32]:
        """As `read`, of every page: [num_pages, planes, page_size, heads, head_dim]."""
        return self._numbers(self.codes, self.scales)

    def _numbers(
        self, codes: NDArray[Any], scales: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        numbers = unpacked(codes) if self._is_packed else codes
        found: NDArray[np.float32] = numbers.astype(np.float32)
        return found if scales is None else found * scales[..., None]

    def queries(self, heads: NDArray[Any]) -> NDArray[np.float32]:
        """[..., head_dim] as they are multiplied by the pool's keys: turned as those are, and
        rounded to their own type."""
        if not self._is_packed:
            return heads.astype(np.float32)
        block = hadamard_block(self._head_dim)
        turned = hadamard_product(heads, block) / np.float32(block)
        return cast(turned, str(heads.dtype)).astype(np.float32)

    def write(self, plane: int, slots: NDArray[Any], heads: NDArray[np.float32]) -> None:
        """Round [slots, heads, head_dim]; with scales, by each head's largest magnitude, and a head
        that is not finite has the scale NaN."""
        pages, offsets = np.divmod(slots, self._page_size)
        stored: NDArray[Any] = heads
        if self.scales is not None:
            rows = heads.reshape(-1, heads.shape[-1])
            finite = np.isfinite(rows).all(axis=1)
            rows = np.nan_to_num(rows, posinf=0, neginf=0)
            if self._is_packed:
                block = hadamard_block(self._head_dim)
                rows = hadamard_product(rows, block) if plane == 0 else rows
                scales = signed_scales(rows)
                stored = packed(rows / scales[:, None])
            else:
                stored, scales = quantize_rows(rows, 1, "i8")
                scales = scales[:, 0]
            scales[~finite] = np.nan
            stored = stored.reshape(*heads.shape[:-1], -1)
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
