"""builder/passes/lower_swiglu.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    given,
    nodes,
    ops,
)
from trtc.builder.graph_writer import Value
from trtc.builder.passes.lower_swiglu import LOWER_SWIGLU


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Tiny(), 2e-6),
        (Tiny(gemma=True), 2e-6),
        (Tiny("bf16"), 0.02),
        (Tiny("fp8", dtype="f32"), 2e-3),
    ],
    ids=str,
)
def test_gated_activations_are_one(kind: Tiny, tolerance: float) -> None:
    _, new = assert_preserves(LOWER_SWIGLU, kind, tolerance)
    assert ops(new)["trtc.swiglu"] == 2
    assert not any(ops(new)[op] for op in ("Sigmoid", "Gelu", "Mul"))
    expected = "gelu_tanh" if kind.gemma else "silu"
    assert {attributes(node)["activation"] for node in nodes(new, "swiglu")} == {expected}


def test_operands_in_any_order() -> None:
    hand = Hand()
    gate, up = hand.input("gate", "T", 8), hand.input("up", "T", 8)
    sigmoid = hand.node("Sigmoid", "m.s", [gate], "T", 8)
    active = hand.node("Mul", "m.a", [sigmoid, gate], "T", 8)
    module = hand.module(hand.node("Mul", "m.p", [up, active], "T", 8))
    lowered, changed = LOWER_SWIGLU(module)
    assert changed and ops(lowered) == {"trtc.swiglu": 1}
    assert list(nodes(lowered, "swiglu")[0].input)[:2] == ["gate", "up"]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_an_activation_before_a_linear_needs_no_gate(activation: str) -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    if activation == "gelu_tanh":
        active = hand.node("Gelu", "m.gelu", [x], "T", 8, approximate="tanh")
    elif activation == "relu2":
        relu = hand.node("Relu", "m.relu", [x], "T", 8)
        active = hand.node("Mul", "m.relu2", [relu, relu], "T", 8)
    else:
        sigmoid = hand.node("Sigmoid", "m.sigmoid", [x], "T", 8)
        active = hand.node("Mul", "m.silu", [x, sigmoid], "T", 8)
    settings = {"N": 4, "weight_dtype": "f32", "out_dtype": "f32"}
    out = hand.node("linear", "m.down", [active, hand.weight("w", 4, 8)], "T", 4, **settings)
    whole = hand.module(out)
    lowered, changed = LOWER_SWIGLU(whole)
    assert changed and ops(lowered) == {"trtc.swiglu": 1, "trtc.linear": 1}
    (node,) = nodes(lowered, "swiglu")
    assert attributes(node)["activation"] == activation and set(given(node)) == {"gate"}
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for before, after in zip(hand.run(whole, x=values), hand.run(lowered, x=values), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)


def test_a_sigmoid_of_another_tensor_is_a_gate_and_no_part_of_a_silu() -> None:
    hand = Hand()
    gate, up, third = (hand.input(name, "T", 8) for name in ("gate", "up", "third"))
    sigmoid = hand.node("Sigmoid", "m.s", [gate], "T", 8)
    gated = hand.node("Mul", "m.a", [sigmoid, third], "T", 8)
    whole = hand.module(hand.node("Mul", "m.p", [gated, up], "T", 8))
    lowered, changed = LOWER_SWIGLU(whole)
    assert changed and ops(lowered) == {"trtc.swiglu": 1, "Mul": 1}
    (node,) = nodes(lowered, "swiglu")
    assert list(node.input)[:2] == ["gate", "third"]
    assert attributes(node)["activation"] == "sigmoid"
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal((3, 8), np.float32) for name in ("gate", "up", "third")}
    for before, after in zip(hand.run(whole, **values), hand.run(lowered, **values), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("case", ["erf", "read elsewhere", "row", "plain"])
def test_other_products_are_left_alone(case: str) -> None:
    hand = Hand()
    gate, up = hand.input("gate", "T", 8), hand.input("up", "T", 8)
    extra: list[Value] = []
    if case == "erf":
        active = hand.node("Gelu", "m.a", [gate], "T", 8, approximate="none")
    elif case == "plain":
        active = gate
    else:
        sigmoid = hand.node("Sigmoid", "m.s", [gate], "T", 8)
        active = hand.node("Mul", "m.a", [sigmoid, gate], "T", 8)
    if case == "read elsewhere":
        extra = [active]
    if case == "row":
        up = hand.weight("row", 8)
    module = hand.module(hand.node("Mul", "m.p", [active, up], "T", 8), *extra)
    assert_unchanged(LOWER_SWIGLU, module)
