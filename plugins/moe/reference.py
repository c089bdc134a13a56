"""Routed experts as Transformers runs them: a router chooses, MLPs compute."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate, sigmoid
from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.iq4 import values_of
from trtc.plugins.moe.routing import Routing, route
from trtc.plugins.products import scaled_product, scales_in_units
from trtc.plugins.rounding import cast, dequantize_rows, quantize, quantize_rows
from trtc.plugins.row_major import row_major, row_major_groups

Array = NDArray[Any]


def reference(
    x: Array,
    router_logits: Array,
    gate_up: Array,
    down: Array,
    gate_up_scale: Array | None,
    down_scale: Array | None,
    gate_up_zero: Array | None,
    down_zero: Array | None,
    gate_up_input_scale: Array | None,
    down_input_scale: Array | None,
    gate_up_pre_scale: Array | None,
    down_pre_scale: Array | None,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    residual: Array | None,
    choice_bias: Array | None,
    shared: Array | None,
    shared_gate: Array | None,
    expert_scale: Array | None,
    expert_map: Array | None,
    gate_up_order: Array | None,
    gate_up_scale_unit: Array | None,
    down_scale_unit: Array | None,
    *,
    I: int,  # noqa: E741 (the operator's axis symbol)
    parts: int,
    top_k: int,
    score: str,
    margin: float,
    num_groups: int,
    top_groups: int,
    group_score: str,
    renormalize: int,
    epsilon: float,
    scale: float,
    weighs_inputs: int,
    activation: str,
    limit: float,
    up_offset: float,
    group_size: int,
    weight_dtype: str,
    layout: str,
    act_quant: str,
    hadamard: int,
    out_dtype: str,
) -> tuple[Array]:
    """Return sum over a row's experts of weight * down(act(gate) * up), or of weight *
    down(act(up)), [M, H], + sigmoid(shared_gate) * shared + residual."""
    hidden, num_experts = x.shape[1], router_logits.shape[1]
    through = str(x.dtype)
    here = num_experts if expert_map is None else int(expert_map.max()) + 1
    gate_up = row_major(gate_up, (here, parts * I, hidden), weight_dtype, layout)
    down = row_major(down, (here, hidden, I), weight_dtype, layout)
    gate_up_scale, down_scale, gate_up_zero, down_zero = (
        row_major_groups(values, layout)
        for values in (gate_up_scale, down_scale, gate_up_zero, down_zero)
    )
    if gate_up_scale is not None and gate_up_scale_unit is not None:
        gate_up_scale = scales_in_units(gate_up_scale, gate_up_scale_unit, weight_dtype)
    if down_scale is not None and down_scale_unit is not None:
        down_scale = scales_in_units(down_scale, down_scale_unit, weight_dtype)
    if weight_dtype == "iq4":
        gate_up, down = values_of(gate_up), values_of(down)

    def linear(
        rows: Array,
        e: int,
        w: Array,
        scale: Any,
        zero: Any,
        input_scale: Any,
        pre_scale: Any,
        bias: Any,
    ) -> Array:
        static = act_quant in ("f8e4m3", "i8")
        rows = quantize(
            rows,
            None if pre_scale is None else pre_scale[e],
            input_scale[e] if static else None,
            act_quant if static else through,
            through=through,
        )
        rows = hadamard_product(rows, hadamard)
        if act_quant == "dynamic_f8e4m3":
            scales = rows.shape[1] // (group_size or rows.shape[1])
            rows = dequantize_rows(*quantize_rows(rows, scales, "f8e4m3"))
        product = scaled_product(
            rows,
            w[e],
            None if scale is None else scale[e],
            None if zero is None else zero[e],
            group_size,
            "dynamic_i8" if act_quant == "dynamic_i8" else "exact",
        )
        if static:
            product = product * np.float32(input_scale[e])
        return product if bias is None else product + bias[e]

    routing = Routing(
        top_k, score, margin, num_groups, top_groups, group_score, bool(renormalize), epsilon, scale
    )
    experts, weights = route(router_logits, choice_bias, routing, expert_scale)
    experts = _numbered_here(experts, expert_map)
    total = np.zeros(x.shape, np.float32)
    for rank in range(top_k):
        for expert in np.unique(experts[experts[:, rank] >= 0, rank]):
            rows = np.flatnonzero(experts[:, rank] == expert)
            given, share = _weighed(x[rows], weights[rows, rank, None], weighs_inputs)
            if gate_up_order is not None:
                given = given[:, gate_up_order[expert]]
            both = cast(
                linear(
                    given,
                    expert,
                    gate_up,
                    gate_up_scale,
                    gate_up_zero,
                    gate_up_input_scale,
                    gate_up_pre_scale,
                    gate_up_bias,
                ),
                through,
            ).astype(np.float32)
            activated = (
                activate(both, activation)
                if parts == 1
                else _gated(both[:, :I], both[:, I:], activation, limit, up_offset, through)
            )
            y = linear(
                cast(activated, through),
                expert,
                down,
                down_scale,
                down_zero,
                down_input_scale,
                down_pre_scale,
                down_bias,
            )
            total[rows] += share * y
    if shared is not None:
        opened = 1.0 if shared_gate is None else sigmoid(shared_gate)
        total = total + opened * shared.astype(np.float32)
    if residual is not None:
        total = total + residual.astype(np.float32)
    return (cast(total, out_dtype),)


def _numbered_here(experts: Array, expert_map: Array | None) -> Array:
    """Numbers among the experts whose weights are given; -1: of another rank."""
    return experts if expert_map is None else expert_map[experts]


def _weighed(rows: Array, weights: Array, weighs_inputs: int) -> tuple[Array, Array]:
    """What an expert reads, and what multiplies its result."""
    if not weighs_inputs:
        return rows, weights
    weighted = cast(weights * rows.astype(np.float32), str(rows.dtype))
    return weighted, np.ones_like(weights)


def _gated(
    gate: Array, up: Array, activation: str, limit: float, up_offset: float, through: str
) -> Array:
    """activation(gate) * (up + up_offset), both clamped if there is a limit; f32."""
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    active: Array = cast(activate(gate, activation), through).astype(np.float32)
    return active * (up + np.float32(up_offset))
