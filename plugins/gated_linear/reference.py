"""A gated linear unit from its quantised input to its quantised output, rounded once."""

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
    weight_scale: Array,
    input_scale: Array,
    out_scale: Array,
    *,
    I: int,  # noqa: E741
    weight_dtype: str,
    activation: str,
) -> tuple[Array]:
    """Return quantize(activation(gate) * up) of gate, up = x @ (weight * scales).T, [M, I]."""
    products = scaled_product(x, weight, weight_scale, None, 0, "exact")
    products = products * input_scale.astype(np.float32)
    gated = activate(products[:, :I], activation) * products[:, I:]
    return (quantize(gated, None, out_scale, "f8e4m3", through="f32"),)
