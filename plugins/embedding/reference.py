"""Table lookup, and Gemma's scale."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(token_ids: Array, table: Array, *, scale: float, out_dtype: str) -> tuple[Array]:
    """Return table[token_ids] * scale, with rows and scale first rounded to `out_dtype`."""
    rows = cast(table[token_ids], out_dtype).astype(np.float32)
    rounded_scale = cast(np.asarray(scale, np.float32), out_dtype).astype(np.float32)
    return (cast(rows * rounded_scale, out_dtype),)
