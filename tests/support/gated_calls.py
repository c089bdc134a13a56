"""Calls of gated_linear, as the tests of its kernels make them."""

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import random_array, scalar
from tests.support.weights import random_scales, random_weight
from trtc.plugins.gated_linear.op import GATED_LINEAR
from trtc.plugins.rounding import cast


def gated_call(
    rows: int,
    width: int,
    depth: int,
    *,
    dtype: str = "f8e4m3",
    activation: str = "silu",
    by_row: bool = False,
) -> KernelCall:
    """Products of the order of one, and of two in E4M3, where rows may have scales of their own."""
    rng = np.random.default_rng(11)
    weight = random_weight(rng, 2 * width, depth, dtype=dtype)
    inputs = {"x": random_array(rng, rows, depth, dtype=dtype)}
    if dtype == "f8e4m3":
        inputs |= {
            "weight": weight,
            "weight_scale": random_scales(
                rng, 2 * width, depth=depth, group=0, dtype=dtype, x_dtype=dtype
            ),
        }
        inputs |= (
            {"row_scale": rng.uniform(1, 2.5, (rows, 1)).astype(np.float32)}
            if by_row
            else {"input_scale": scalar(1.75), "out_scale": scalar(0.03125)}
        )
    else:
        inputs["weight"] = cast(weight.astype(np.float32) / np.float32(depth**0.5), dtype)
    attributes: dict[str, int | float | str] = {
        "I": width,
        "weight_dtype": dtype,
        "activation": activation,
        "scales": int(by_row),
    }
    return KernelCall(GATED_LINEAR, attributes, inputs, ("out_row_scale",) if by_row else ())
