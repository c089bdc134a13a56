"""The lightning indexer's queries and keys (DeepSeek-V3.2, arXiv:2512.02556) before they are
multiplied: the first dimensions of each are rotated."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    q: Array,
    k: Array,
    positions: Array,
    slots: Array,
    cos: Array,
    sin: Array,
    norm: Array,
    bias: Array,
    pool: Array,
    *,
    num_heads: int,
    eps: float,
) -> tuple[Array, Array]:
    """Return (q with every head rotated; a copy of the pool with the keys at `slots`)."""
    through, half = str(q.dtype), cos.shape[1]
    c = cos[positions][:, None, :].astype(np.float32)
    s = sin[positions][:, None, :].astype(np.float32)

    def rotated(x: Array) -> Array:
        first, second, plain = np.split(x.astype(np.float32), (half, 2 * half), axis=-1)
        turned = (first * c - second * s, second * c + first * s, plain)
        return cast(np.concatenate(turned, axis=-1), through)

    queries = rotated(q.reshape(len(q), num_heads, -1)).reshape(q.shape)
    centered = k.astype(np.float32)
    centered = centered - centered.mean(axis=-1, keepdims=True)
    variance = np.mean(centered * centered, axis=-1, keepdims=True)
    normed = centered / np.sqrt(variance + np.float32(eps)) * norm + bias
    keys = rotated(cast(normed.astype(np.float32), through)[:, None])[:, 0]
    written = pool.copy()
    pages, offsets = np.divmod(slots, pool.shape[2])
    written[pages, 0, offsets, 0] = cast(keys.astype(np.float32), str(pool.dtype))
    return queries, written
