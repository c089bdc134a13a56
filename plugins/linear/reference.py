"""Matrix products over quantised weights, in fp32 sums of exact products."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.iq4 import values_of
from trtc.plugins.products import scaled_product, scales_in_units
from trtc.plugins.rounding import cast, dequantize_rows
from trtc.plugins.row_major import row_major, row_major_groups

Array = NDArray[Any]


def reference(
    x: Array,
    weight: Array,
    weight_scale: Array | None,
    weight_zero: Array | None,
    input_scale: Array | None,
    bias: Array | None,
    residual: Array | None,
    row_scale: Array | None,
    scale_unit: Array | None,
    *,
    N: int,
    group_size: int,
    weight_dtype: str,
    layout: str,
    activation: str,
    softcap: float,
    out_dtype: str,
) -> tuple[Array]:
    """Return (x * row_scale) @ dequantised(weight).T * input_scale (+ bias) [softcapped]
    (+ residual), [M, N]."""
    weight = row_major(weight, (N, x.shape[1]), weight_dtype, layout)
    weight_scale = row_major_groups(weight_scale, layout)
    weight_zero = row_major_groups(weight_zero, layout)
    if row_scale is not None:
        x = dequantize_rows(x, row_scale)
    if weight_scale is not None and scale_unit is not None:
        weight_scale = scales_in_units(weight_scale, scale_unit, weight_dtype)
    if weight_dtype == "iq4":
        weight = values_of(weight)
    total = scaled_product(x, weight, weight_scale, weight_zero, group_size, activation)
    if input_scale is not None:
        total = total * input_scale.astype(np.float32)
    if bias is not None:
        total = total + bias.astype(np.float32)
    if softcap:
        total = np.float32(softcap) * np.tanh(total / np.float32(softcap))
    if residual is not None:
        total = total + residual.astype(np.float32)
    return (cast(total, out_dtype),)
