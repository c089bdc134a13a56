"""builder/passes/fuse_shared_expert.py."""

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
from trtc.builder.passes.fuse_shared_expert import FUSE_SHARED_EXPERT


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Tiny(experts=4, shared="gated"), 2e-6), (Tiny("bf16", experts=4, shared="gated"), 0.03)],
    ids=str,
)
def test_a_gated_expert_is_added_by_the_routed_ones(kind: Tiny, tolerance: float) -> None:
    old, new = assert_preserves(FUSE_SHARED_EXPERT, kind, tolerance)
    assert ops(old)["Sigmoid"] - ops(new)["Sigmoid"] == 2
    assert ops(old)["Add"] - ops(new)["Add"] == 2
    for layer, moe in enumerate(nodes(new, "moe")):
        assert given(moe)["shared"] == f"layers.{layer}.mlp.shared.down.matmul.out"
        assert given(moe)["shared_gate"] == f"layers.{layer}.mlp.shared_gate.matmul.out"


def test_one_without_a_gate_is_added_too() -> None:
    kind = Tiny(experts=4, shared="plain")
    old, new = assert_preserves(FUSE_SHARED_EXPERT, kind, 2e-6)
    assert ops(old)["Add"] - ops(new)["Add"] == 2
    assert all(
        given(moe)["shared"] and "shared_gate" not in given(moe) for moe in nodes(new, "moe")
    )


@pytest.mark.parametrize("kind", [Tiny(experts=4), Tiny()], ids=str)
def test_models_without_one_stay(kind: Tiny) -> None:
    module, _ = before(FUSE_SHARED_EXPERT, kind)
    assert_unchanged(FUSE_SHARED_EXPERT, module)


@pytest.mark.parametrize("case", ["routed read", "shared read", "gate of each column"])
def test_other_sums_are_left_alone(case: str) -> None:
    hand, hidden, inner, experts = Hand(), 8, 4, 2
    x, y = hand.input("x", "T", hidden), hand.input("y", "T", hidden)
    logits = hand.input("logits", "T", experts)
    gate = hand.input("gate", "T", hidden if case == "gate of each column" else 1)
    rng = np.random.default_rng(2)
    weights = [
        hand.constant("gate_up", rng.standard_normal((experts, 2 * inner, hidden)).astype("f4")),
        hand.constant("down", rng.standard_normal((experts, hidden, inner)).astype("f4")),
    ]
    routed = hand.node(
        "moe", "moe", [x, logits, *weights], "T", hidden, I=inner, top_k=1, renormalize=1,
        activation="silu", weight_dtype="f32", out_dtype="f32",
    )  # fmt: skip
    share = hand.node("Sigmoid", "sigmoid", [gate], "T", gate.shape[1])
    shared = hand.node("Mul", "gated", [y, share], "T", hidden)
    total = hand.node("Add", "sum", [routed, shared], "T", hidden)
    more = {"routed read": [routed], "shared read": [shared]}.get(case, [])
    assert_unchanged(FUSE_SHARED_EXPERT, hand.module(total, *more))
