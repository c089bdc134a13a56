"""Activation functions of MLPs, for the references."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIGMOIDS = {"silu": 1.0, "quick_gelu": 1.702}
"""Activation -> a, of x * sigmoid(a x)."""


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / (1 + exp(-x)), rounded to fp32 once."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)


def activate(x: NDArray[np.float32], activation: str) -> NDArray[Any]:
    """SiLU, GELU in its tanh form or its quick one, ReLU squared, or the sigmoid, rounded to fp32
    once: 1 + tanh cancels in fp32."""
    wide: NDArray[Any] = x.astype(np.float64)
    if activation in _SIGMOIDS:
        # exp overflows to infinity below -709, where the quotient is the right -0.
        with np.errstate(over="ignore"):
            return np.asarray(wide / (1 + np.exp(-_SIGMOIDS[activation] * wide)), np.float32)
    if activation == "sigmoid":
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-wide)), np.float32)
    if activation == "relu2":
        return np.asarray(np.maximum(wide, 0.0) ** 2, np.float32)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    return np.asarray(0.5 * wide * (1 + np.tanh(inner)), np.float32)
