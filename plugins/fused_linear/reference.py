"""rms_norm, linear and swiglu one after the other, each rounded to bf16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.iq4 import values_of
from trtc.plugins.products import scaled_product, scales_in_units
from trtc.plugins.rounding import cast, quantize
from trtc.plugins.tiles import CHANNELS, untile, untile_groups

Array = NDArray[Any]
_THROUGH = "bf16"


def reference(
    x: Array,
    norm_weight: Array | None,
    norm_pre_scale: Array | None,
    weight: Array,
    weight_scale: Array,
    weight_zero: Array | None,
    bias: Array | None,
    gate_pre_scale: Array | None,
    scale_unit: Array | None,
    *,
    I: int,  # noqa: E741
    group_size: int,
    weight_dtype: str,
    eps: float,
    gated: int,
    activation: str,
) -> tuple[Array]:
    """Return what the operators there are of the three give, [M, I]."""
    if norm_weight is not None:
        x = _normed(x, norm_weight, norm_pre_scale, eps)
    weight, scale, zero = (
        untile(weight, CHANNELS),
        untile_groups(weight_scale),
        untile_groups(weight_zero),
    )
    if scale_unit is not None:
        assert scale is not None
        scale = scales_in_units(scale, scale_unit, weight_dtype)
    if weight_dtype == "iq4":
        weight = values_of(weight)
    total = scaled_product(x, weight, scale, zero, group_size, "exact")
    if bias is not None:
        total = total + bias.astype(np.float32)
    product = cast(total, _THROUGH)
    if not gated:
        return (product,)
    gates, ups = (half.astype(np.float32) for half in (product[:, :I], product[:, I:]))
    result = cast(activate(gates, activation), _THROUGH).astype(np.float32) * ups
    return (quantize(result, gate_pre_scale, None, _THROUGH, through=_THROUGH),)


def _normed(x: Array, weight: Array, pre_scale: Array | None, eps: float) -> Array:
    values = x.astype(np.float32)
    scale = 1.0 / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + np.float32(eps))
    normed = values * scale * weight.astype(np.float32)
    return quantize(normed, pre_scale, None, _THROUGH, through=_THROUGH)
