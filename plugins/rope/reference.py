"""Per-head RMSNorm and rotary embedding (Su et al. 2021, arXiv:2104.09864)."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    q: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    q_norm: Array | None,
    *,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
    norm_after: int,
) -> tuple[Array]:
    """Return q with every head normalised, before or after pairs (i, i + rotary_dim / 2) of it are
    turned."""
    through, half = str(q.dtype), rotary_dim // 2

    def normed(heads: NDArray[np.float32]) -> NDArray[np.float32]:
        if q_norm is None:
            return heads
        mean_square = np.mean(heads * heads, axis=-1, keepdims=True)
        scaled = heads / np.sqrt(mean_square + np.float32(eps)) * q_norm.astype(np.float32)
        return cast(scaled, through).astype(np.float32)

    heads = q.astype(np.float32).reshape(-1, num_heads, head_dim)
    if not norm_after:
        heads = normed(heads)
    c = cos[positions][:, None, :].astype(np.float32)
    s = sin[positions][:, None, :].astype(np.float32)
    first, second, rest = np.split(heads, (half, rotary_dim), axis=-1)
    out = np.concatenate((first * c - second * s, second * c + first * s, rest), axis=-1)
    if norm_after:
        out = normed(cast(out, through).astype(np.float32))
    return (cast(out, through).reshape(q.shape),)
