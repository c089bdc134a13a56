"""Calls of routed experts of every kind, for the tests of each target's kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels import KernelCall
from tests.support.operands import random_array
from tests.support.weights import random_scales, random_weight, stored, stored_groups
from trtc.plugins.compact import compact_scales
from trtc.plugins.gpu.lowering import ONE, Collective, Extent, Gemm, Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.moe.op import MOE

Array = NDArray[Any]

ROWS, EXPERTS = 40, 5
_ALIGNED = 8
"""Elements after which a row may begin: 16 bytes at least."""
ROUTERS: Mapping[str, Mapping[str, int | float | str]] = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid", "epsilon": 1e-6, "scale": 2.5},
    "weighs inputs": {"score": "sigmoid", "weighs_inputs": 1},
    "groups": {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 1.5},
    "sparsemixer": {"score": "sparsemixer", "margin": 0.5},
    "groups by the largest": {"num_groups": 4, "top_groups": 3, "group_score": "max"},
}
"""Attributes of routers by what they are."""


@dataclass(frozen=True)
class Case:
    x: str
    weight: str
    hidden: int
    inner: int
    group: int = 0
    e8m0: bool = False
    units: bool = False
    """Scales are E4M3, with a unit a row."""
    words: bool = False
    """Rows of scales are whole words, as those of E8M0."""
    zero: bool = False
    quant: str = "none"
    hadamard: int = 0
    layout: str = "packed"
    top_k: int = 2
    renormalize: int = 1
    activation: str = "silu"
    parts: int = 2
    limit: float = 0.0
    up_offset: float = 0.0
    bias: bool = False
    pre_scale: bool = False
    ordered: bool = False
    """Each expert has the channels of x in an order of its own."""
    residual: bool = True
    experts: int = EXPERTS
    router: str = "softmax"
    choice_bias: bool = False
    shared: bool = False
    shared_gate: bool = False
    expert_scale: bool = False

    def __str__(self) -> str:
        router = f"-{self.router}" if self.router != "softmax" else ""
        gate = "-gateless" if self.parts == 1 else ""
        ordered = "-ordered" * self.ordered
        turned = f"-hadamard{self.hadamard}" if self.hadamard else ""
        weight = f"{self.weight}{'-units' * self.units}"
        return f"{self.x}x{weight}-{self.quant}{turned}-{self.layout}{router}{gate}{ordered}"


GPT_OSS: dict[str, Any] = {
    "activation": "quick_gelu",
    "limit": 1.5,  # so low that many results of gate and up are beyond it
    "up_offset": 1.0,
    "bias": True,
}
GATELESS: dict[str, Any] = {"activation": "relu2", "parts": 1}
"""As of Nemotron-3."""
CASES = [
    Case("f32", "f32", 24, 20, residual=False, renormalize=0),
    Case(
        *("f32", "f32", 17, 33),
        layout="row_major",
        top_k=EXPERTS,
        activation="gelu_tanh",
        expert_scale=True,
    ),
    Case("bf16", "bf16", 48, 24, top_k=1),
    Case("bf16", "bf16", 48, 41, layout="compact"),
    Case("bf16", "f8e4m3", 48, 40, quant="f8e4m3"),
    Case("bf16", "i8", 33, 24, quant="i8", pre_scale=True),
    Case("bf16", "i4", 64, 32, 32, pre_scale=True),
    Case("bf16", "i4", 64, 32, 16, quant="dynamic_i8", pre_scale=True),
    Case("bf16", "u4", 48, 32, 16, zero=True, quant="dynamic_i8", layout="row_major"),
    Case("bf16", "f8e4m3", 96, 64, 32, quant="dynamic_f8e4m3"),
    Case("bf16", "f8e4m3", 48, 40, quant="dynamic_f8e4m3", pre_scale=True),
    Case("bf16", "iq4", 64, 32, 32, quant="dynamic_i8"),
    Case("bf16", "i8", 96, 64, quant="dynamic_i8", hadamard=32),
    Case("bf16", "i6", 64, 48, 16, quant="dynamic_i8"),
    Case("f32", "f32", 24, 20, **GPT_OSS),
    Case("bf16", "bf16", 48, 41, layout="row_major", **GPT_OSS),
    Case("bf16", "i8", 33, 24, quant="i8", **GPT_OSS),
    Case("bf16", "f4e2m1", 96, 64, 32, **GPT_OSS),
    Case("f32", "f4e2m1", 64, 32, 32, layout="row_major"),
    Case("bf16", "f4e2m1", 96, 48, 16, units=True, **GPT_OSS),
    Case("bf16", "f4e2m1", 96, 64, 16, units=True, quant="dynamic_i8"),
    Case("bf16", "f4e2m1", 80, 48, 16, units=True, quant="dynamic_i8", layout="row_major"),
    Case("f32", "f4e2m1", 64, 48, 16, units=True, pre_scale=True, **GATELESS),
    Case("f32", "f32", 16, 12, router="sigmoid", choice_bias=True, shared=True),
    Case("f32", "f32", 16, 12, router="sigmoid", shared=True, shared_gate=True, residual=False),
    Case("f32", "f32", 16, 12, router="weighs inputs", top_k=1, renormalize=0, shared=True),
    Case("bf16", "f8e4m3", 48, 40, quant="f8e4m3", router="weighs inputs", renormalize=0),
    Case("f32", "f32", 16, 12, router="groups", choice_bias=True, experts=12, top_k=4),
    Case("f32", "f32", 16, 12, router="sparsemixer", experts=12, renormalize=0),
    Case("f32", "f32", 16, 12, router="groups", experts=20, renormalize=0),
    Case("f32", "f32", 16, 12, router="groups by the largest", experts=20, top_k=6),
    Case("bf16", "bf16", 16, 12, choice_bias=True, shared=True, shared_gate=True),
    Case("f32", "f32", 24, 20, **GATELESS),
    Case("bf16", "bf16", 48, 41, layout="compact", **GATELESS),
    Case("bf16", "f8e4m3", 48, 40, quant="f8e4m3", **GATELESS),
    Case("bf16", "f8e4m3", 48, 40, quant="dynamic_f8e4m3", **GATELESS),
    Case("bf16", "i4", 64, 32, 32, pre_scale=True, **GATELESS),
    Case("f32", "f32", 24, 20, ordered=True),
    Case("bf16", "i4", 64, 32, 32, ordered=True),
    Case("bf16", "u4", 48, 32, 16, zero=True, quant="dynamic_i8", ordered=True),
    Case("bf16", "i8", 33, 24, quant="i8", ordered=True, router="weighs inputs"),
]


def moe_call(rng: np.random.Generator, case: Case, rows: int = ROWS) -> KernelCall:
    width = -(-case.hidden // _ALIGNED) * _ALIGNED + 2 * _ALIGNED
    inputs: dict[str, Any] = {
        "x": random_array(rng, rows, width, dtype=case.x)[:, _ALIGNED : _ALIGNED + case.hidden],
        "router_logits": random_array(rng, rows, case.experts, spread=2),
    }
    halves = (("gate_up", case.parts * case.inner, case.hidden), ("down", case.hidden, case.inner))
    for name, columns, depth in halves:
        weight = random_weight(rng, case.experts, columns, depth, dtype=case.weight)
        inputs[name] = stored(weight, case.weight, case.layout)
        if case.layout == "compact":
            inputs[f"{name}_scale"] = compact_scales(weight)
        elif case.weight not in ("f32", "bf16"):
            scales = _scales(rng, case, columns, depth)
            inputs[f"{name}_scale"] = stored_groups(scales, case.layout)
        if case.units:
            # They undo the size of the numbers of E4M3, and that of a sum.
            units = 2.0 ** -rng.integers(6, 10, (case.experts, columns)).astype(np.float32)
            inputs[f"{name}_scale_unit"] = units / np.float32(depth**0.5)
        if case.zero:
            zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
            inputs[f"{name}_zero"] = stored_groups(zeros, case.layout)
        if case.quant in ("f8e4m3", "i8"):
            scales = rng.uniform(0.02, 0.03, case.experts)
            inputs[f"{name}_input_scale"] = scales.astype(np.float32)
        if case.bias:
            inputs[f"{name}_bias"] = random_array(rng, case.experts, columns)
        if case.pre_scale:
            scales = rng.uniform(0.5, 2, (case.experts, depth))
            inputs[f"{name}_pre_scale"] = scales.astype(np.float32)
    if case.ordered:
        orders = [rng.permutation(case.hidden) for _ in range(case.experts)]
        inputs["gate_up_order"] = np.array(orders, np.int32)
    if case.residual:
        inputs["residual"] = random_array(rng, rows, case.hidden, dtype=case.x)
    inputs |= _of_router_and_shared(rng, case, rows)
    attributes: dict[str, int | float | str] = {
        "I": case.inner,
        "parts": case.parts,
        "top_k": case.top_k,
        **ROUTERS[case.router],
        "renormalize": case.renormalize,
        "activation": case.activation,
        "limit": case.limit,
        "up_offset": case.up_offset,
        "group_size": case.group,
        "weight_dtype": case.weight,
        "layout": case.layout,
        "act_quant": case.quant,
        "hadamard": case.hadamard,
        "out_dtype": case.x,
    }
    return KernelCall(MOE, attributes, inputs)


def _scales(rng: np.random.Generator, case: Case, columns: int, depth: int) -> Array:
    """[experts, columns, groups]."""
    scales = random_scales(
        rng, case.experts, columns, depth=depth, group=case.group, dtype=case.weight, x_dtype=""
    )
    shape = scales.shape
    if case.e8m0 or case.words:
        shape = (*shape[:-1], -(-shape[-1] // 4) * 4)
    if case.e8m0:
        # Powers of two that undo the size of a sum.
        middle = 127 - round(np.log2(2 * depth**0.5))
        return rng.integers(middle - 1, middle + 2, shape).astype(np.uint8)
    # Of E4M3 every number that is not negative.
    return rng.integers(0, 127, shape).astype(np.uint8) if case.units else scales


def _of_router_and_shared(rng: np.random.Generator, case: Case, rows: int) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    if case.choice_bias:
        inputs["choice_bias"] = rng.uniform(-0.5, 0.5, case.experts).astype(np.float32)
    if case.expert_scale:
        inputs["expert_scale"] = rng.uniform(0.5, 2, case.experts).astype(np.float32)
    if case.shared:
        inputs["shared"] = random_array(rng, rows, case.hidden + 5, dtype=case.x)[:, 2:-3]
    if case.shared_gate:
        inputs["shared_gate"] = random_array(rng, rows, 3, spread=2)[:, 1:2]
    return inputs


def with_experts(call: KernelCall, here: range) -> KernelCall:
    """The call of a rank that has these experts alone."""
    weights = {
        parameter.name: np.ascontiguousarray(array[here.start : here.stop])
        for parameter in call.op.inputs
        if parameter.axes[0] == "L" and (array := call.inputs.get(parameter.name)) is not None
    }
    experts = call.inputs["router_logits"].shape[1]
    numbers = np.full(experts, -1, np.int32)
    numbers[here] = np.arange(len(here))
    return replace(call, inputs={**call.inputs, **weights, "expert_map": numbers})


def take_rows(call: KernelCall, rows: Any) -> KernelCall:
    varying = {
        name: np.ascontiguousarray(array[rows])
        for name, array in call.inputs.items()
        if name in ("x", "router_logits", "residual", "shared", "shared_gate") and array is not None
    }
    return replace(call, inputs={**call.inputs, **varying})


def lower_for_two_blocks(site: Site) -> tuple[Variant, ...]:
    """As the operator is lowered, but that products of E2M1 weights on sm_90 have two thread
    blocks."""
    from trtc.plugins.moe.cuda import lower

    return tuple(
        replace(variant, work=tuple(_in_two_blocks(one) for one in variant.work))
        for variant in lower(site)
    )


def _in_two_blocks(launch: Launch | Gemm | Collective) -> Launch | Gemm | Collective:
    kernel = launch.kernel if isinstance(launch, Launch) else None
    if isinstance(kernel, CudaSource) and kernel.entry.startswith("experts_e2m1"):
        assert isinstance(launch, Launch)
        return replace(launch, grid=(Extent(times=2), ONE, ONE))
    return launch
