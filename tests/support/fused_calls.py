"""Calls of fused_linear, and of the operators that it is made of."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import random_array
from tests.support.weights import random_scales, random_weight, stored, stored_groups
from trtc.plugins.fused_linear.op import FUSED_LINEAR


@dataclass(frozen=True)
class Fused:
    """One kind of call."""

    columns: int
    """Of the weight: twice those of the result with a gate."""
    depth: int
    weight: str = "i4"
    group: int = 128
    norm: bool = True
    norm_pre_scale: bool = False
    gate: str = "none"
    gate_pre_scale: bool = False
    bias: bool = False


def fused_call(rng: np.random.Generator, case: Fused, rows: int = 1) -> KernelCall:
    weight = random_weight(rng, case.columns, case.depth, dtype=case.weight)
    scales = random_scales(
        rng, case.columns, depth=case.depth, group=case.group, dtype=case.weight, x_dtype="bf16"
    )
    width = case.columns if case.gate == "none" else case.columns // 2
    inputs: dict[str, Any] = {
        "x": random_array(rng, rows, case.depth, dtype="bf16", spread=3.0 if case.norm else 1.0),
        "weight": stored(weight, case.weight, "tiles"),
        "weight_scale": stored_groups(scales, "tiles"),
    }
    if case.norm:
        inputs["norm_weight"] = 1 + random_array(rng, case.depth, spread=0.2)
    if case.norm_pre_scale:
        inputs["norm_pre_scale"] = np.abs(random_array(rng, case.depth)) + np.float32(0.5)
    if case.weight == "u4":
        zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
        inputs["weight_zero"] = stored_groups(zeros, "tiles")
    if case.weight == "iq4":
        inputs["weight_scale"] = stored_groups(
            rng.integers(0, 256, scales.shape, np.uint8), "tiles"
        )
        inputs["scale_unit"] = 2.0 ** -rng.integers(9, 13, case.columns).astype(np.float32)
    if case.weight == "f4e2m1":
        inputs["weight_scale"] = stored_groups(
            rng.integers(120, 124, scales.shape, np.uint8), "tiles"
        )
    if case.bias:
        inputs["bias"] = random_array(rng, case.columns)
    if case.gate_pre_scale:
        inputs["gate_pre_scale"] = np.abs(random_array(rng, width)) + np.float32(0.5)
    attributes: dict[str, int | float | str] = {
        "I": width,
        "group_size": case.group,
        "weight_dtype": case.weight,
        "eps": 1e-5,
        "gated": int(case.gate != "none"),
        "activation": "silu" if case.gate == "none" else case.gate,
    }
    return KernelCall(FUSED_LINEAR, attributes, inputs)
