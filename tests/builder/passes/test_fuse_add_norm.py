"""builder/passes/fuse_add_norm.py."""

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
from trtc.builder.passes.fuse_add_norm import FUSE_ADD_NORM


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
def test_post_norms_and_pre_norms_meet(scheme: str) -> None:
    """Gemma 2: the sum is rounded as before, so bf16 agrees bit for bit as well."""
    old, new = assert_preserves(FUSE_ADD_NORM, Tiny(scheme, gemma=True), tolerance=0.0)
    # Each layer adds twice; the last sum is read by the choice of logit rows.
    assert ops(old)["Add"] == 4 and ops(new)["Add"] == 1
    fused = [node for node in nodes(new, "rms_norm") if "residual" in given(node)]
    assert [node.name for node in fused] == [
        "layers.0.mlp_norm",
        "layers.1.attention_norm",
        "layers.1.mlp_norm",
    ]
    assert all(len(node.output) == 2 for node in fused)


@pytest.mark.parametrize("kind", [Tiny(), Tiny("fp8"), Tiny(experts=4)], ids=str)
def test_where_linears_took_the_sums_nothing_is_left(kind: Tiny) -> None:
    module, _ = before(FUSE_ADD_NORM, kind)
    assert_unchanged(FUSE_ADD_NORM, module)


def _norm(hand: Hand, name: str, x: Value) -> Value:
    inputs = [x, None, hand.weight(f"{name}.weight", 8)]
    return hand.node("rms_norm", name, inputs, "T", 8, eps=1e-5, out_dtype="f32")


@pytest.mark.parametrize("is_read_elsewhere", [False, True])
def test_the_sum_is_given_when_others_read_it(is_read_elsewhere: bool) -> None:
    hand = Hand()
    x, y = hand.input("x", "T", 8), hand.input("y", "T", 8)
    total = hand.node("Add", "sum", [x, y], "T", 8)
    names = ("n", "m") if is_read_elsewhere else ("n",)
    module = hand.module(*(_norm(hand, name, total) for name in names))
    fused, changed = FUSE_ADD_NORM(module)
    assert changed and ops(fused) == {"trtc.rms_norm": 1 + is_read_elsewhere}
    first = {node.name: node for node in nodes(fused, "rms_norm")}["n"]
    assert list(first.output) == (["n.out", "sum.out"] if is_read_elsewhere else ["n.out"])
    values = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    for expected, found in zip(
        hand.run(module, x=values[0], y=values[1]),
        hand.run(fused, x=values[0], y=values[1]),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", ["bias", "broadcast", "no sum", "weight", "types", "full"])
def test_other_norms_are_left_alone(case: str) -> None:
    hand = Hand()
    x = hand.input("x", *((4, 8) if case == "weight" else ("T", 8)))
    others = {
        "bias": hand.weight("b", 8),
        "broadcast": hand.input("one", 1, 8),
        "weight": hand.weight("constant", 4, 8),
        "types": hand.input("narrow", "T", 8, dtype="bf16"),
        "full": hand.input("y", "T", 8),
    }
    if case == "no sum":
        assert_unchanged(FUSE_ADD_NORM, hand.module(_norm(hand, "n", x)))
        return
    for index, pair in enumerate(([x, others[case]], [others[case], x])):
        total = hand.node("Add", f"sum{index}", pair, *x.shape)
        residual = hand.input(f"r{index}", "T", 8) if case == "full" else None
        inputs = [total, residual, hand.weight("w", 8)]
        name = f"n{index}"
        last = hand.node("rms_norm", name, inputs, *x.shape, eps=1e-5, out_dtype="f32")
    assert_unchanged(FUSE_ADD_NORM, hand.module(last))
