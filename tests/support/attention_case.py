"""Random ragged batches over a scrambled pool, for the kernels of kv_write and paged_attention."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.operands import stale_pool
from trtc.plugins.kv_pool import PagedHeads
from trtc.plugins.rounding import cast

Array = NDArray[Any]


@dataclass(frozen=True)
class Sequence:
    context: int
    """Tokens after the step."""
    new: int


@dataclass(frozen=True)
class Batch:
    q: Array
    pool: Array
    slots: Array
    """Of the new tokens."""
    query_start: Array
    context_lens: Array
    page_table: Array


def make_batch(
    sequences: list[Sequence],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    pool_dtype: str,
    window: int = 0,
    seed: int = 0,
) -> Batch:
    """Every sequence's pages are written up to its context, and NaN beyond, which nobody may read.
    It has let go of those that its `window` has left: a stale page stands in the table instead."""
    rng = np.random.default_rng(seed)
    widths = [-(-one.context // page_size) for one in sequences]
    num_pages = sum(widths) + 3
    free = rng.permutation(num_pages)
    table = np.zeros((len(sequences), max(widths)), np.int32)
    pool = stale_pool(num_pages, page_size, num_kv_heads, head_dim, pool_dtype)
    written = PagedHeads(pool, head_dim)
    slots = []
    for index, (one, width) in enumerate(zip(sequences, widths, strict=True)):
        table[index, :width], free = free[:width], free[width:]
        for position in range(one.context):
            page, offset = table[index, position // page_size], position % page_size
            heads = rng.normal(size=(2, num_kv_heads, head_dim)).astype(np.float32)
            for plane in (0, 1):
                written.write(plane, np.array([page * page_size + offset]), heads[plane][None])
            if position >= one.context - one.new:
                slots.append(page * page_size + offset)
        if window:
            gone = max(0, one.context - one.new - window + 1) // page_size
            table[index, :gone] = free[-1]
    starts = np.cumsum([0, *(one.new for one in sequences)]).astype(np.int32)
    q = rng.normal(size=(int(starts[-1]), num_heads * head_dim)).astype(np.float32)
    return Batch(
        q=cast(q, dtype),
        pool=pool,
        slots=np.asarray(slots, np.int32),
        query_start=starts,
        context_lens=np.asarray([one.context for one in sequences], np.int32),
        page_table=table,
    )
