"""builder/passes/lower_add.py."""

import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    before,
    nodes,
    ops,
)
from trtc.builder.passes.lower_add import LOWER_ADD


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
def test_the_last_sum_of_gemma_is_left_for_add(scheme: str) -> None:
    _, new = assert_preserves(LOWER_ADD, Tiny(scheme, gemma=True), tolerance=0.0)
    assert ops(new)["Add"] == 0
    assert [node.name for node in nodes(new, "add")] == ["layers.1.mlp.residual"]


def test_other_models_have_none() -> None:
    module, _ = before(LOWER_ADD, Tiny())
    assert_unchanged(LOWER_ADD, module)


@pytest.mark.parametrize("case", ["bias", "broadcast", "cube", "constant", "types"])
@pytest.mark.parametrize("is_first", [False, True])
def test_sums_of_other_shapes_are_left_alone(case: str, is_first: bool) -> None:
    hand = Hand()
    shapes = {"cube": (2, "T", 8), "constant": (4, 8)}
    shape = shapes.get(case, ("T", 8))
    x = hand.input("x", *shape)
    others = {
        "bias": hand.weight("b", 8),
        "broadcast": hand.input("one", 1, 8),
        "constant": hand.weight("c", 4, 8),
        "types": hand.input("narrow", "T", 8, dtype="bf16"),
    }
    pair = [x, others.get(case, x)]
    out = hand.node("Add", "sum", pair[::-1] if is_first else pair, *shape)
    assert_unchanged(LOWER_ADD, hand.module(out))
