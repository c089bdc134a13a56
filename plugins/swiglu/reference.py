"""Gated linear unit's elementwise part: Shazeer 2020 (arXiv:2002.05202)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast, quantize

Array = NDArray[np.generic]


def activate(x: NDArray[np.float32], activation: str) -> NDArray[Any]:
    """SiLU, or GELU in its tanh form, in fp32."""
    if activation == "silu":
        # exp overflows to infinity below -88, where the quotient is the right -0.
        with np.errstate(over="ignore"):
            return x / (np.float32(1.0) + np.exp(-x))
    inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + np.tanh(inner))


def reference(
    gate: Array,
    up: Array,
    pre_scale: Array | None,
    out_scale: Array | None,
    *,
    activation: str,
    out_dtype: str,
) -> tuple[Array]:
    """Return quantize(activation(gate) * up), the activation rounded to gate's type."""
    through = str(gate.dtype)
    activated = cast(activate(gate.astype(np.float32), activation), through)
    product = activated.astype(np.float32) * up.astype(np.float32)
    return (quantize(product, pre_scale, out_scale, out_dtype, through=through),)
