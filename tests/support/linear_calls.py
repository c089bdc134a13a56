"""Calls of the linear operator, as the tests of its kernels make them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import random_array, scalar
from tests.support.weights import random_scales, random_weight, stored, stored_groups
from trtc.plugins.compact import compact_scales
from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.linear.op import LINEAR

ROWS = 33


@dataclass(frozen=True)
class Case:
    """One kind of linear. The sizes go over the edges of panels, blocks, groups and ranges."""

    x: str
    weight: str
    columns: int
    depth: int
    group: int = 0
    zero: bool = False
    bytes: bool = False
    """Scales are bytes, with a unit a row."""
    powers: bool = False
    """Scales are E8M0."""
    activation: str = "exact"
    layout: str = "packed"
    input_scale: bool = False
    scales: int = 0
    """Of a row of x."""
    bias: bool = False
    residual: bool = False
    softcap: float = 0.0
    out: str = "bf16"

    def __str__(self) -> str:
        kind = f"{self.x}x{self.weight}-{self.columns}x{self.depth}"
        return f"{kind}-{self.activation}-{self.layout}" + (
            "-zero" if self.zero else "-bytes" if self.bytes else "-powers" if self.powers else ""
        )


CASES = [
    Case("f32", "f32", 1, 1, out="f32"),
    Case("f32", "f32", 80, 131, bias=True, residual=True, out="f32"),
    Case("f32", "f32", 17, 300, softcap=3.0, out="f32", layout="row_major"),
    Case("bf16", "bf16", 1, 3),
    Case("bf16", "bf16", 17, 64, out="f32", softcap=2.0),
    Case("bf16", "bf16", 100, 521, bias=True, residual=True),
    Case("bf16", "bf16", 33, 31, layout="row_major"),
    Case("bf16", "bf16", 1, 3, layout="compact", out="f32"),
    Case("bf16", "bf16", 97, 1093, layout="compact", bias=True, residual=True),
    Case("bf16", "bf16", 40, 264, layout="compact", softcap=2.0, out="f32"),
    Case("bf16", "f8e4m3", 17, 270, input_scale=True),
    Case("f8e4m3", "f8e4m3", 100, 521, input_scale=True, bias=True),
    Case("f8e4m3", "f8e4m3", 16, 5, input_scale=True, out="f32", layout="row_major"),
    Case("bf16", "i8", 70, 261, residual=True),
    Case("i8", "i8", 80, 1030, input_scale=True, residual=True),
    Case("i8", "i8", 17, 7, input_scale=True, bias=True, out="f32", layout="row_major"),
    Case("f8e4m3", "f8e4m3", 100, 521, scales=1, bias=True),
    Case("i8", "i8", 80, 1030, scales=1, residual=True),
    Case("bf16", "i4", 97, 136, 32, bias=True),
    Case("bf16", "i4", 16, 40, layout="row_major"),
    Case("bf16", "u4", 64, 200, 64, zero=True),
    Case("bf16", "u4", 16, 64, 16, zero=True, layout="row_major"),
    Case("bf16", "i4", 80, 2056, 128, activation="dynamic_i8", residual=True),
    Case("bf16", "i4", 17, 72, activation="dynamic_i8", out="f32"),
    Case("bf16", "i4", 17, 48, 16, activation="dynamic_i8", layout="row_major"),
    Case("bf16", "u4", 100, 136, 32, zero=True, activation="dynamic_i8", bias=True),
    Case("bf16", "iq4", 97, 1096, 32, bytes=True, activation="dynamic_i8", out="f32"),
    Case("bf16", "iq4", 170, 264, 16, bytes=True, activation="dynamic_i8", bias=True),
    Case("bf16", "iq4", 33, 136, 32, activation="dynamic_i8", layout="row_major", bytes=True),
    Case("bf16", "iq4", 97, 264, 32, bytes=True, bias=True, residual=True),
    Case("bf16", "iq4", 40, 72, 32, layout="row_major"),
    Case("bf16", "f4e2m1", 97, 1096, 32, powers=True, activation="dynamic_i8", out="f32"),
    Case("bf16", "f4e2m1", 170, 264, 16, bytes=True, activation="dynamic_i8", bias=True),
    Case("bf16", "f4e2m1", 33, 136, 32, activation="dynamic_i8", layout="row_major", powers=True),
    Case("bf16", "f4e2m1", 33, 136, 16, activation="dynamic_i8", layout="row_major", bytes=True),
    Case("bf16", "f4e2m1", 97, 264, 32, powers=True, bias=True, residual=True),
    Case("bf16", "f4e2m1", 97, 264, 16, bytes=True, softcap=2.0, out="f32"),
    Case("bf16", "f4e2m1", 40, 72, 32, activation="dynamic_i8"),
    Case("bf16", "i6", 97, 1160, 128, activation="dynamic_i8", out="f32"),
    Case("bf16", "i6", 170, 272, 32, activation="dynamic_i8", bias=True),
    Case("bf16", "i6", 97, 264, 128, bias=True, residual=True),
    Case("bf16", "i8", 97, 1092, 128, activation="dynamic_i8", out="f32"),
    Case("bf16", "i8", 17, 70, activation="dynamic_i8"),
    Case("bf16", "i8", 40, 48, 16, activation="dynamic_i8", layout="row_major"),
    Case("bf16", "i8", 97, 1096, 128, activation="dynamic_i8", layout="planes", out="f32"),
    Case("bf16", "i8", 16, 24, 8, activation="dynamic_i8", layout="planes", softcap=3.0, out="f32"),
    Case("bf16", "i8", 170, 264, 128, activation="dynamic_i8", layout="planes", bias=True),
    # For the references of narrow schemes in fp32 graphs.
    Case("f32", "f8e4m3", 17, 33, out="f32"),
    Case("f32", "f8e4m3", 80, 256, 128, residual=True),
    Case("bf16", "f8e4m3", 48, 96, 32),
    Case("f32", "i8", 16, 12, out="f32"),
    Case("f32", "i4", 16, 64, 32, out="f32"),
    Case("f32", "i6", 16, 64, 32, out="f32"),
    Case("f32", "u4", 16, 64, 32, zero=True, out="f32"),
    Case("f32", "iq4", 16, 64, 32, out="f32"),
    Case("f32", "f4e2m1", 16, 64, 32, powers=True, out="f32"),
    Case("f32", "f4e2m1", 16, 64, 16, bytes=True, out="f32"),
]


def linear_call(rng: np.random.Generator, case: Case, rows: int = ROWS) -> KernelCall:
    """x and residual are columns of wider matrices, as the plan's views are."""
    if case.x == "i8":
        x = rng.integers(-128, 128, (rows, case.depth + 5)).astype(np.int8)
    else:
        x = random_array(rng, rows, case.depth + 5, dtype=case.x)
    weight = random_weight(rng, case.columns, case.depth, dtype=case.weight)
    inputs: dict[str, Any] = {
        "x": x[:, 3 : 3 + case.depth],
        "weight": stored(weight, case.weight, case.layout),
    }
    if case.layout == "compact":
        inputs["weight_scale"] = compact_scales(weight)
    elif case.weight not in ("f32", "bf16"):
        scales = random_scales(
            rng, case.columns, depth=case.depth, group=case.group, dtype=case.weight, x_dtype=case.x
        )
        if case.powers:
            exponent = 125 - int(np.log2(_root(case.depth)))
            scales = rng.integers(exponent - 3, exponent + 1, scales.shape).astype(np.uint8)
        elif case.bytes:
            # Of E4M3 every number that is not negative; they are larger than those of iq4.
            least, codes = (7, 256) if case.weight == "iq4" else (8, 127)
            scales = rng.integers(0, codes, scales.shape).astype(np.uint8)
            unit = 2.0 ** -rng.integers(least, least + 4, case.columns).astype(np.float32)
            inputs["scale_unit"] = unit / np.float32(_root(case.depth))
        inputs["weight_scale"] = stored_groups(scales, case.layout)
    if case.zero:
        zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
        inputs["weight_zero"] = stored_groups(zeros, case.layout)
    if case.input_scale:
        inputs["input_scale"] = scalar(0.75)
    if case.scales:
        inputs["row_scale"] = rng.uniform(0.5, 2, (rows, case.scales)).astype(np.float32)
    if case.bias:
        inputs["bias"] = random_array(rng, case.columns)
    if case.residual:
        residual = random_array(rng, rows, case.columns + 9, dtype=case.out)
        inputs["residual"] = residual[:, 2 : 2 + case.columns]
    attributes: dict[str, int | float | str] = {
        "N": case.columns,
        "group_size": case.group,
        "weight_dtype": case.weight,
        "layout": case.layout,
        "activation": case.activation,
        "softcap": case.softcap,
        "out_dtype": case.out,
    }
    return KernelCall(LINEAR, attributes, inputs)


def _root(depth: int) -> float:
    """The power of two that is nearest to the square root."""
    return float(2.0 ** np.rint(np.log2(depth) / 2))


def take_rows(call: KernelCall, rows: slice) -> KernelCall:
    """The same call with some of its rows."""
    varying = {
        name: array[rows]
        for name, array in call.inputs.items()
        if name in ("x", "residual", "row_scale") and array is not None
    }
    return replace(call, inputs={**call.inputs, **varying})


def tile_variants(site: Site) -> tuple[Variant, ...]:
    """The tile kernel alone, as `lower` gives variants."""
    from trtc.plugins.gemm.cuda import tiles_launch

    return (Variant(work=(tiles_launch(site),), max_rows=site.limits.max_num_tokens),)


def cap_variants(site: Site) -> tuple[Variant, ...]:
    """What follows the library's product."""
    from trtc.plugins.gemm.cuda import lower_gemm

    variant = lower_gemm(site)[-1]
    return (replace(variant, work=variant.work[1:]),)
