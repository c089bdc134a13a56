"""Per-head RMSNorm, rotary embedding (Su et al. 2021, arXiv:2104.09864) and the KV write."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.kv_pool import PagedHeads
from trtc.plugins.rounding import cast

Array = NDArray[Any]


def reference(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    slots: Array,
    cos: Array,
    sin: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    v_norm: Array | None,
    q_scale: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    pool: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
    norm_after: int,
) -> tuple[Array, Array]:
    """Return (rotated q, scaled by its position; a copy of the pool with the rotated k and the
    normalised v at `slots`)."""
    through = str(q.dtype)

    def normed(x: Array, num: int, norm: Array | None) -> Array:
        heads = x.astype(np.float32).reshape(-1, num, head_dim)
        if norm is None:
            return heads
        mean_square = np.mean(heads * heads, axis=-1, keepdims=True)
        heads = heads / np.sqrt(mean_square + np.float32(eps)) * norm.astype(np.float32)
        return cast(heads, through).astype(np.float32)

    def rotated(x: Array, num: int, norm: Array | None) -> Array:
        heads = normed(x, num, None if norm_after else norm)
        half = rotary_dim // 2
        c = cos[positions][:, None, :].astype(np.float32)
        s = sin[positions][:, None, :].astype(np.float32)
        first, second, rest = np.split(heads, (half, rotary_dim), axis=-1)
        out = np.concatenate((first * c - second * s, second * c + first * s, rest), axis=-1)
        return cast(normed(cast(out, through), num, norm if norm_after else None), through)

    written = pool.copy()
    heads = PagedHeads(written, head_dim)
    keys = rotated(k, num_kv_heads, k_norm)
    values = normed(v, num_kv_heads, v_norm)
    for index, (rows, scale) in enumerate(((keys, k_scale), (values, v_scale))):
        stored = rows.astype(np.float32)
        if scale is not None:
            stored = np.divide(stored, scale, dtype=np.float32)
        heads.write(index, slots, stored)
    queries = rotated(q, num_heads, q_norm).reshape(q.shape)
    if q_scale is not None:
        queries = cast(queries.astype(np.float32) * q_scale[positions][:, None], through)
    return queries, written
