"""The elementwise part of an MLP, gated (Shazeer 2020, arXiv:2002.05202) or not."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.rounding import cast, quantize, quantize_rows

Array = NDArray[np.generic]


def reference(
    gate: Array,
    up: Array | None,
    pre_scale: Array | None,
    out_scale: Array | None,
    *,
    activation: str,
    scales: int,
    hadamard: int,
    out_dtype: str,
) -> tuple[Array, Array | None]:
    """Return (quantize(activation(gate) * up), the activation rounded to gate's type; without `up`
    the activation alone; and the scales of each row if it has its own)."""
    through = str(gate.dtype)
    activated = cast(activate(gate.astype(np.float32), activation), through)
    product = activated.astype(np.float32)
    if up is not None:
        product = product * up.astype(np.float32)
    if scales:
        values = quantize(product, pre_scale, None, through, through=through)
        values = hadamard_product(values, hadamard)
        return quantize_rows(values, scales, out_dtype)
    return quantize(product, pre_scale, out_scale, out_dtype, through=through), None
