"""A gated linear unit from its input to its output, quantised or not, rounded once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.products import scaled_product
from trtc.plugins.rounding import cast, quantize, quantize_rows

Array = NDArray[Any]


def reference(
    x: Array,
    weight: Array,
    weight_scale: Array | None,
    input_scale: Array | None,
    out_scale: Array | None,
    row_scale: Array | None,
    *,
    I: int,  # noqa: E741
    weight_dtype: str,
    activation: str,
    scales: int,
) -> tuple[Array, Array | None]:
    """Return quantize(activation(gate) * up) of gate, up = x @ (weight * scales).T, [M, I], and the
    scales of its rows where x has scales of rows, [M, 1]."""
    products = scaled_product(x, weight, weight_scale, None, 0, "exact")
    if input_scale is not None:
        products = products * input_scale.astype(np.float32)
    if row_scale is not None:
        products = products * row_scale
    gated = activate(products[:, :I], activation) * products[:, I:]
    if row_scale is not None:
        return quantize_rows(cast(gated, "bf16"), scales, weight_dtype)
    return quantize(gated, None, out_scale, weight_dtype, through="f32"), None
