"""Per-layer embeddings of Gemma 3n and Gemma 4."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]
Floats = NDArray[np.float32]


def reference(
    projected: Array,
    token_ids: Array,
    table: Array,
    norm: Array,
    *,
    width: int,
    eps: float,
    table_scale: float,
    scale: float,
) -> tuple[Array]:
    """Return (norm(projected) + table[token_ids] * table_scale) * scale: in fp32, rounded to the
    type of `projected` after the norm, each product and the sum."""
    through = str(projected.dtype)

    def rounded(values: Floats) -> Floats:
        return cast(values, through).astype(np.float32)

    parts = projected.astype(np.float32).reshape(len(projected), -1, width)
    mean_square = np.mean(parts * parts, axis=-1, keepdims=True)
    normed = rounded(parts / np.sqrt(mean_square + np.float32(eps)) * norm.astype(np.float32))
    rows = rounded(table[token_ids].astype(np.float32) * np.float32(table_scale))
    total = rounded(normed.reshape(projected.shape) + rows)
    return (cast(total * np.float32(scale), through),)
