"""Quantisation of an activation, or its pre-quantisation scale alone."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import quantize

Array = NDArray[np.generic]


def reference(
    x: Array, pre_scale: Array | None, out_scale: Array | None, *, out_dtype: str
) -> tuple[Array]:
    """Return cast(round(x * pre_scale) / out_scale), rounding as plugins/rounding.py says."""
    return (quantize(x, pre_scale, out_scale, out_dtype, through=str(x.dtype)),)
