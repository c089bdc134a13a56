"""Writing of a step's keys and values into the paged pool."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.kv_pool import PagedHeads

Array = NDArray[Any]


def reference(
    k: Array,
    v: Array,
    pool: Array,
    slots: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    *,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Array]:
    """Return a copy of the pool with k / k_scale and v / v_scale at `slots`."""
    written = pool.copy()
    heads = PagedHeads(written, head_dim)
    for index, (rows, scale) in enumerate(((k, k_scale), (v, v_scale))):
        values = rows.astype(np.float32).reshape(-1, num_kv_heads, head_dim)
        if scale is not None:
            values = np.divide(values, scale, dtype=np.float32)
        heads.write(index, slots, values)
    return (written,)
