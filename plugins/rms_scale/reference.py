"""The second half of RMS normalisation (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]
Floats = NDArray[np.float32]


def reference(x: Array, squares: Floats, weight: Floats, *, width: int, eps: float) -> tuple[Array]:
    """Return x divided by the root of a row's mean square, by channel scaled."""
    root = np.sqrt(squares / np.float32(width) + np.float32(eps))
    return (cast(x.astype(np.float32) / root * weight, str(x.dtype)),)
