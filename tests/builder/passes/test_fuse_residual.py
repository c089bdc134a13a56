"""builder/passes/fuse_residual.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    before,
    given,
    nodes,
    ops,
)
from trtc.builder.graph_writer import Value
from trtc.builder.passes.fuse_residual import FUSE_RESIDUAL


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Tiny(), 2e-6),
        (Tiny(bias=True), 2e-6),
        (Tiny("int8_sq", dtype="f32"), 2e-3),
        (Tiny(experts=4), 2e-6),
        (Tiny("bf16"), 0.03),
    ],
    ids=str,
)
def test_residuals_are_added_by_what_precedes_them(kind: Tiny, tolerance: float) -> None:
    old, new = assert_preserves(FUSE_RESIDUAL, kind, tolerance)
    assert ops(old)["Add"] == 4 and ops(new)["Add"] == 0
    assert len(old.model.graph.node) - len(new.model.graph.node) == 4
    linears = {node.name: given(node) for node in nodes(new, "linear")}
    assert linears["layers.0.attention.o"]["residual"] == "embedding.gather.out"
    if kind.experts:
        assert [given(n)["residual"] for n in nodes(new, "moe")] == [
            f"layers.{layer}.attention.residual.out" for layer in range(2)
        ]
    else:
        assert linears["layers.1.mlp.down"]["residual"] == "layers.1.attention.residual.out"


def test_post_norms_stand_between() -> None:
    module, _ = before(FUSE_RESIDUAL, Tiny(gemma=True))
    assert_unchanged(FUSE_RESIDUAL, module)


def _linear(hand: Hand, name: str, x: Value, residual: Value | None = None) -> Value:
    inputs = [x, hand.weight(f"{name}.weight", 4, 8), None, None, None, None, residual]
    return hand.node("linear", name, inputs, "T", 4, N=4, weight_dtype="f32", out_dtype="f32")


@pytest.mark.parametrize(
    "case", ["read elsewhere", "output", "full", "weight", "broadcast", "type"]
)
def test_other_sums_are_left_alone(case: str) -> None:
    hand = Hand()
    x, r = hand.input("x", "T", 8), hand.input("r", "T", 4)
    product = _linear(hand, "m.a", x, hand.input("z", "T", 4) if case == "full" else None)
    other = r
    if case == "weight":
        other = hand.weight("bias", 4)
    if case == "broadcast":
        other = hand.input("one", 1, 4)
    if case == "type":
        narrow = hand.input("narrow", "T", 4, dtype="bf16")
        other = hand.node("quantize", "m.narrow", [narrow], "T", 4, dtype="bf16", out_dtype="bf16")
    total = hand.node("Add", "m.sum", [product, other], "T", 4)
    outs = [total]
    if case == "output":
        outs.append(product)
    if case == "read elsewhere":
        outs.append(hand.node("add", "m.more", [product, r], "T", 4))
    assert_unchanged(FUSE_RESIDUAL, hand.module(*outs))


def test_the_sum_of_two_products_and_of_itself() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    first, second = _linear(hand, "m.a", x), _linear(hand, "m.b", x)
    total = hand.node("Add", "m.sum", [first, second], "T", 4)
    double = hand.node("Add", "m.double", [total, total], "T", 4)
    module = hand.module(double)
    fused, changed = FUSE_RESIDUAL(module)
    assert changed and ops(fused) == {"trtc.linear": 2, "Add": 1}
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    np.testing.assert_allclose(hand.run(fused, x=values), hand.run(module, x=values), atol=1e-5)
