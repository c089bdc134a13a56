"""Chosen columns."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def reference(x: Array, columns: Array) -> tuple[Array]:
    """Return x[:, columns]."""
    return (x[:, columns],)
