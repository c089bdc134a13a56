"""builder/passes/lower_experts.py."""

from typing import Any

import numpy as np
import onnx
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_same_function,
    assert_unchanged,
    attributes,
    nodes,
    ops,
    tiny,
)
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.lower_experts import LOWER_EXPERTS
from trtc.plugins.moe.op import MOE
from trtc.plugins.moe.reference import reference
from trtc.protos.errors import UnsupportedError

KINDS = [
    Tiny(experts=5),
    Tiny("fp8", experts=4, dtype="f32"),
    Tiny("fp8", experts=4, dtype="f32", equal_input_scales=False, per_tensor=True),
    Tiny("int8_sq", experts=4, dtype="f32", pre_scales=True, equal_pre_scales=True),
    Tiny("int4_awq", experts=4, dtype="f32", pre_scales=True, equal_pre_scales=True),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_computes_what_it_did(kind: Tiny) -> None:
    """The oracle is trtc.moe's reference. A code of an activation may fall to the other side."""
    old, reader = tiny(kind)
    new, changed = run_passes(old, [LOWER_EXPERTS])
    assert changed and ops(old)["trtc.moe"] == 2 and ops(new)["trtc.moe"] == 0
    eight_bits = kind.scheme in ("fp8", "int8_sq")
    assert_same_function(old, new, reader, 0.02 if eight_bits else 1e-5)
    assert_unchanged(LOWER_EXPERTS, new)


def test_in_bf16_it_is_as_near_as_rounding_allows() -> None:
    old, reader = tiny(Tiny("bf16", experts=4))
    new, _ = run_passes(old, [LOWER_EXPERTS])
    assert_same_function(old, new, reader, 0.05)


def test_every_node_says_where_it_belongs() -> None:
    new, _ = run_passes(tiny(Tiny("fp8", experts=4))[0], [LOWER_EXPERTS])
    added = [node for node in new.model.graph.node if ".experts." in node.name]
    assert {node.name.split(".mlp.")[0] for node in added} == {"layers.0", "layers.1"}
    assert nodes(new, "Cast")[-1].domain == ""


def test_8_bit_scales_are_along_one_axis_and_4_bit_ones_in_blocks() -> None:
    """What TensorRT takes: see tests/tensorrt/test_legality.py."""
    for scheme, rank, attribute in (("fp8", 1, "axis"), ("int4_awq", 3, "block_size")):
        new, _ = run_passes(tiny(Tiny(scheme, experts=4))[0], [LOWER_EXPERTS])
        shapes = {tensor.name: len(tensor.dims) for tensor in new.model.graph.initializer}
        found = [n for n in nodes(new, "DequantizeLinear") if n.name.endswith("weight_dq")]
        experts = [node for node in found if ".experts." in node.name]
        assert len(experts) == 2 * 2
        for node in experts:
            assert shapes[node.input[1]] == rank
            assert attribute in attributes(node)


@pytest.mark.parametrize(
    ("renormalize", "weighs_inputs", "activation"),
    [(0, 0, "silu"), (1, 0, "gelu_tanh"), (0, 1, "silu")],
)
def test_one_node_by_hand(renormalize: int, weighs_inputs: int, activation: str) -> None:
    """Ties go to the lower expert, weights are shared out or not, before experts or after them."""
    hand, experts, hidden, width = Hand(), 4, 8, 6
    x, logits = hand.input("x", "T", hidden), hand.input("logits", "T", experts)
    rng = np.random.default_rng(1)
    gate_up = rng.standard_normal((experts, 2 * width, hidden)).astype(np.float32)
    down = rng.standard_normal((experts, hidden, width)).astype(np.float32)
    fields: dict[str, Any] = {
        "I": width,
        "top_k": 2,
        "renormalize": renormalize,
        "weighs_inputs": weighs_inputs,
        "activation": activation,
        "weight_dtype": "f32",
        "out_dtype": "f32",
    }
    weights = [hand.constant("gate_up", gate_up), hand.constant("down", down)]
    out = hand.node("moe", "layers.0.mlp.moe", [x, logits, *weights], "T", hidden, **fields)
    new, _ = LOWER_EXPERTS(hand.module(out))
    rows = rng.standard_normal((3, hidden)).astype(np.float32)
    routed = np.asarray([[1, 1, 1, 1], [0, 2, 2, 2], [3, -1, 5, 0]], np.float32)
    (found,) = hand.run(new, x=rows, logits=routed)
    nothing: dict[str, Any] = dict.fromkeys(
        f"{which}_{part}"
        for which in ("gate_up", "down")
        for part in ("scale", "zero", "input_scale", "pre_scale", "bias", "scale_unit")
    )
    nothing |= dict.fromkeys(
        ("residual", "choice_bias", "shared", "shared_gate", "expert_scale", "expert_map")
    )
    nothing["gate_up_order"] = None
    complete: dict[str, Any] = MOE.complete_attributes(fields)
    (wanted,) = reference(rows, routed, gate_up, down, **nothing, **complete)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("gate_up_bias", "has biases or limits"),
        ("limit", "has biases or limits"),
        ("gate_up_order", r"has experts with scattered groups \(act-order\)"),
    ],
)
def test_experts_of_gpt_oss_and_scattered_ones_are_refused(given: str, problem: str) -> None:
    hand, experts, hidden, width = Hand(), 4, 8, 6
    x, logits = hand.input("x", "T", hidden), hand.input("logits", "T", experts)
    shapes = {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
    weights: dict[str, Any] = {
        name: hand.constant(name, np.ones(shape, np.float32)) for name, shape in shapes.items()
    }
    fields: dict[str, Any] = {"I": width, "top_k": 2, "renormalize": 1, "activation": "quick_gelu"}
    fields |= {"weight_dtype": "f32", "out_dtype": "f32"}
    if given == "limit":
        fields["limit"] = 7.0
    elif given == "gate_up_order":
        weights[given] = hand.constant(given, np.zeros((experts, hidden)), "i32")
    else:
        weights[given] = hand.constant(given, np.ones((experts, 2 * width), np.float32))
    inputs = [x, logits, *(weights.get(one.name) for one in MOE.inputs[2:])]
    out = hand.node("moe", "layers.0.mlp.moe", inputs, "T", hidden, **fields)
    with pytest.raises(UnsupportedError, match=rf"layers\.0\.mlp\.moe: {problem}"):
        LOWER_EXPERTS(hand.module(out))


def test_no_shape_depends_on_data() -> None:
    """Every tensor's shape is stated in T: TensorRT need not wait for the router."""
    new: Module = run_passes(tiny(Tiny("int8_sq", experts=4))[0], [LOWER_EXPERTS])[0]
    stated = {info.name: info.type.tensor_type.shape.dim for info in new.model.graph.value_info}
    for node in new.model.graph.node:
        if ".mlp." in node.name and node.op_type != "TopK":
            for dim in stated[node.output[0]]:
                assert dim.dim_param == "T" or dim.dim_value > 0, node.name
    inferred = onnx.shape_inference.infer_shapes(new.model, check_type=True, strict_mode=False)
    assert len(inferred.graph.node) == len(new.model.graph.node)
