"""RMS normalisation as written in Zhang & Sennrich 2019 (arXiv:1910.07467), eq. 4, and layer
normalisation (Ba et al. 2016, arXiv:1607.06450)."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.rounding import cast, quantize, quantize_rows

Array = NDArray[np.generic]


def reference(
    x: Array,
    residual: Array | None,
    weight: Array,
    bias: Array | None,
    pre_scale: Array | None,
    out_scale: Array | None,
    *,
    eps: float,
    centered: int,
    scales: int,
    hadamard: int,
    out_dtype: str,
) -> tuple[Array, Array | None, Array | None, Array]:
    """Return (normalised and scaled, x + residual when there is a residual, the scales of each row
    if the result has its own, normalised and not scaled)."""
    total = x.astype(np.float32)
    total_out = None
    if residual is not None:
        total_out = cast(total + residual.astype(np.float32), str(x.dtype))
        # The sum is rounded to the residual stream's type before it is normalised.
        total = total_out.astype(np.float32)
    if centered:
        total = total - np.mean(total, axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(np.mean(total * total, axis=-1, keepdims=True) + np.float32(eps))
    normed = total * scale * weight.astype(np.float32)
    if bias is not None:
        normed = normed + bias.astype(np.float32)
    through = str(x.dtype)
    plain = cast(normed, through)
    if scales:
        values = quantize(normed, pre_scale, None, through, through=through)
        values = hadamard_product(values, hadamard)
        codes, row_scale = quantize_rows(values, scales, out_dtype)
        return codes, total_out, row_scale, plain
    out = quantize(normed, pre_scale, out_scale, out_dtype, through=through)
    return out, total_out, None, plain
