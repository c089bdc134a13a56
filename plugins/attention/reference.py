"""Attention of one query over a paged context, for the references."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.kv_pool import PagedHeads

Array = NDArray[Any]
Floats = NDArray[np.float32]


def read_context(
    pool: Array,
    head_dim: int,
    pages: Array,
    context: int,
    k_scale: Array | None,
    v_scale: Array | None,
) -> tuple[Floats, Floats]:
    """Keys and values [context, kv_heads, head_dim] of a sequence, in order of position."""
    positions = np.arange(context)
    page_size = pool.shape[2]
    slots = pages[positions // page_size] * page_size + positions % page_size
    found = PagedHeads(pool, head_dim).read(slots)
    keys, values = found[:, 0], found[:, 1]
    if k_scale is not None:
        keys = keys * k_scale.astype(np.float32)
    if v_scale is not None:
        values = values * v_scale.astype(np.float32)
    return keys, values


def weighted_values(
    query: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
    softcap: float,
    sink: np.float32 | None = None,
) -> tuple[np.float32, np.float32, Floats]:
    """Of one query and head: the largest score, the sum of exp(score - largest), and the values
    [head_dim] summed with those weights.

    A sink is one of the scores, without a value.
    """
    scores = keys @ query * np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    largest = scores.max() if sink is None else np.maximum(scores.max(), sink)
    weights = np.exp(scores - largest)
    total = weights.sum() if sink is None else weights.sum() + np.exp(sink - largest)
    return largest, total, weights @ values
