"""builder/passes/lower_swiglu.py."""

import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
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


@pytest.mark.parametrize("case", ["erf", "read elsewhere", "other gate", "row", "plain"])
def test_other_products_are_left_alone(case: str) -> None:
    hand = Hand()
    gate, up = hand.input("gate", "T", 8), hand.input("up", "T", 8)
    extra: list[Value] = []
    if case == "erf":
        active = hand.node("Gelu", "m.a", [gate], "T", 8, approximate="none")
    elif case == "plain":
        active = gate
    else:
        sigmoid = hand.node("Sigmoid", "m.s", [up if case == "other gate" else gate], "T", 8)
        third = hand.input("third", "T", 8) if case == "other gate" else gate
        active = hand.node("Mul", "m.a", [sigmoid, third], "T", 8)
    if case == "read elsewhere":
        extra = [active]
    if case == "row":
        up = hand.weight("row", 8)
    module = hand.module(hand.node("Mul", "m.p", [active, up], "T", 8), *extra)
    assert_unchanged(LOWER_SWIGLU, module)
