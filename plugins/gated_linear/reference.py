"""A gated linear unit from its input to its output, quantised or not, rounded once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.products import scaled_product
from trtc.plugins.rounding import quantize

Array = NDArray[Any]


def reference(
    x: Array,
    weight: Array,
    weight_scale: Array | None,
    input_scale: Array | None,
    out_scale: Array | None,
    *,
    I: int,  # noqa: E741
    weight_dtype: str,
    activation: str,
) -> tuple[Array]:
    """Return quantize(activation(gate) * up) of gate, up = x @ (weight * scales).T, [M, I]."""
    products = scaled_product(x, weight, weight_scale, None, 0, "exact")
    if input_scale is not None:
        products = products * input_scale.astype(np.float32)
    gated = activate(products[:, :I], activation) * products[:, I:]
    return (quantize(gated, None, out_scale, weight_dtype, through="f32"),)
