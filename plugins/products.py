"""Exact products with quantised weights, summed group by group, for the references."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.iq4 import scales_of
from trtc.plugins.rounding import NUMPY_DTYPES

Array = NDArray[Any]

E8M0_BIAS = 127
"""Of E8M0, whose numbers are 2^(code - E8M0_BIAS)."""


def scaled_product(
    x: Array,
    weight: Array,
    weight_scale: Array | None,
    weight_zero: Array | None,
    group_size: int,
    activation: str,
) -> NDArray[np.float32]:
    """Sum over groups of K of (x @ (weight - zero).T) * scale, [M, N] f32.

    Args:
        x: [M, K].
        weight: [N, K], 4-bit values one an element.
        weight_scale: [N, G] f32, G = ceil(K / group_size), or 1 without groups; None: all ones; u8:
            E8M0.
        weight_zero: [N, G] u8; None: zeros.
        activation: `exact`, or `dynamic_i8`: each row's groups of x are rounded to int8 first.
    """
    num_columns, depth = weight.shape
    group = group_size or depth
    if weight_scale is not None and weight_scale.dtype == np.uint8:
        weight_scale = e8m0_values(weight_scale)
    total = np.zeros((len(x), num_columns), np.float32)
    for index, begin in enumerate(range(0, depth, group)):
        part = x[:, begin : begin + group].astype(np.float32)
        part_weight = weight[:, begin : begin + group].astype(np.float64)
        if weight_zero is not None:
            part_weight -= weight_zero[:, index : index + 1]
        x_scale = np.ones((len(x), 1), np.float32)
        if activation == "dynamic_i8":
            part, x_scale = quantize_rows(part)
        # Sums in fp64 stand for the exact sum: kernels may add in another order.
        product = (part.astype(np.float64) @ part_weight.T).astype(np.float32) * x_scale
        if weight_scale is not None:
            product = product * weight_scale[:, index].astype(np.float32)
        total += product
    return total


def scales_in_units(scale: Array, unit: Array, weight_dtype: str) -> NDArray[np.float32]:
    """The scales [..., N, G] that bytes are in the units [..., N] of their rows: E4M3 of E2M1
    weights, else those of plugins/iq4.py."""
    if weight_dtype != "f4e2m1":
        return scales_of(scale, unit[..., None])
    values: NDArray[np.float32] = scale.view(NUMPY_DTYPES["f8e4m3"]).astype(np.float32)
    return values * unit[..., None]


def e8m0_values(scale: Array) -> NDArray[np.float32]:
    """2^(scale - 127) of u8 exponents that are not NaN, 255."""
    return np.ldexp(np.float32(1), scale.astype(np.int32) - E8M0_BIAS)


def quantize_rows(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Symmetric int8 by each row's largest magnitude: (values in -127..127, scale [M, 1])."""
    largest = np.max(np.abs(x), axis=1, keepdims=True)
    # Below 2^-100 the inverse could overflow, and such a group adds nothing to a float sum.
    counts = largest > np.float32(2.0**-100)
    inverse = np.where(counts, np.float32(127) / np.where(counts, largest, 1), np.float32(0))
    return np.rint(x * inverse), np.where(counts, largest / np.float32(127), np.float32(0))
