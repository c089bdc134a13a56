"""Gated linear unit's elementwise part: Shazeer 2020 (arXiv:2002.05202)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast, quantize

Array = NDArray[np.generic]


def activate(x: NDArray[np.float32], activation: str) -> NDArray[Any]:
    """SiLU, or GELU in its tanh form, rounded to fp32 once: 1 + tanh cancels in fp32."""
    wide: NDArray[Any] = x.astype(np.float64)
    if activation == "silu":
        # exp overflows to infinity below -709, where the quotient is the right -0.
        with np.errstate(over="ignore"):
            return np.asarray(wide / (1 + np.exp(-wide)), np.float32)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    return np.asarray(0.5 * wide * (1 + np.tanh(inner)), np.float32)


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
