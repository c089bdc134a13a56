"""Quantisation of an activation, or its pre-quantisation scale alone."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.rounding import cast, dequantize_rows, quantize, quantize_rows

Array = NDArray[np.generic]


def reference(
    x: Array,
    pre_scale: Array | None,
    out_scale: Array | None,
    *,
    out_dtype: str,
    scales: int,
    hadamard: int,
    codes: str,
) -> tuple[Array, Array | None]:
    """Return (cast(round(x * pre_scale) / scale), scale), rounding as plugins/rounding.py says; the
    scale is out_scale, or with `scales` those of each row, [M, scales]. With `hadamard` a Hadamard
    matrix multiplies blocks of the row before that."""
    through = str(x.dtype)
    if not scales:
        return quantize(x, pre_scale, out_scale, out_dtype, through=through), None
    values = hadamard_product(quantize(x, pre_scale, None, through, through=through), hadamard)
    if codes == "none":
        return quantize_rows(values, scales, out_dtype)
    coded, row_scale = quantize_rows(values, scales, codes)
    return cast(dequantize_rows(coded, row_scale), out_dtype), row_scale
