"""The latent of DeepSeek-V2 (arXiv:2405.04434) as the cache stores it: normalised, followed by
the rotary part of the keys."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    q: Array,
    kv: Array,
    positions: Array,
    slots: Array,
    cos: Array,
    sin: Array,
    norm: Array,
    pool: Array,
    q_scale: Array | None,
    *,
    num_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[Array, Array]:
    """Return (q with the last dimensions of every head rotated, scaled by its position; a copy of
    the pool with the latents at `slots`)."""
    through = str(q.dtype)
    rank, half = norm.shape[0], cos.shape[1]
    c = cos[positions][:, None, :].astype(np.float32)
    s = sin[positions][:, None, :].astype(np.float32)

    def rotated(x: Array) -> Array:
        plain, first, second = np.split(
            x.astype(np.float32), (x.shape[-1] - 2 * half, x.shape[-1] - half), axis=-1
        )
        return np.concatenate((plain, first * c - second * s, second * c + first * s), axis=-1)

    queries = cast(rotated(q.reshape(-1, num_heads, head_dim)), through).reshape(q.shape)
    if q_scale is not None:
        queries = cast(queries.astype(np.float32) * q_scale[positions][:, None], through)

    latent = kv[:, :rank].astype(np.float32)
    mean_square = np.mean(latent * latent, axis=-1, keepdims=True)
    normed = latent / np.sqrt(mean_square + np.float32(eps)) * norm.astype(np.float32)
    keys = cast(rotated(kv[:, None, rank:])[:, 0], through)
    stored = np.concatenate((cast(normed, through), keys), axis=-1)
    written = pool.copy()
    pages, offsets = np.divmod(slots, pool.shape[2])
    written[pages, 0, offsets, 0] = cast(stored.astype(np.float32), str(pool.dtype))
    return queries, written
