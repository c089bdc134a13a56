"""builder/passes/lower_embedding.py."""

import numpy as np
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
from trtc.builder.passes.lower_embedding import LOWER_EMBEDDING
from trtc.plugins.rounding import cast


@pytest.mark.parametrize(
    "kind", [Tiny(), Tiny("bf16"), Tiny("bf16", gemma=True), Tiny(tied=True)], ids=str
)
def test_lookup_and_scale_are_one(kind: Tiny) -> None:
    old, new = assert_preserves(LOWER_EMBEDDING, kind, tolerance=0.0)
    assert ops(new)["trtc.embedding"] == 1
    assert ops(old)["Gather"] - ops(new)["Gather"] == 1
    # The scale is the one that the activation type holds.
    scale = float(cast(np.array(1.7), "bf16")) if kind.gemma else 1.0
    assert attributes(nodes(new, "embedding")[0])["scale"] == pytest.approx(scale, abs=0)


@pytest.mark.parametrize("case", ["computed", "columns", "vector", "matrix of ids"])
def test_other_gathers_are_left_alone(case: str) -> None:
    hand = Hand()
    ids = hand.input("ids", "T", dtype="i32")
    table = hand.weight("table", 8, 32)
    if case == "computed":
        out = hand.node("Gather", "g.x", [hand.input("x", 8, 32), ids], "T", 32, axis=0)
    elif case == "columns":
        out = hand.node("Gather", "g.x", [table, ids], 8, "T", axis=1)
    elif case == "vector":
        out = hand.node("Gather", "g.x", [hand.weight("factors", 8), ids], "T", axis=0)
    else:
        square = hand.input("square", 2, "T", dtype="i32")
        out = hand.node("Gather", "g.x", [table, square], 2, "T", 32, axis=0)
    assert_unchanged(LOWER_EMBEDDING, hand.module(out))


def test_only_a_scalar_factor_is_absorbed() -> None:
    hand = Hand()
    ids = hand.input("ids", "T", dtype="i32")
    found = hand.node("Gather", "g.x", [hand.weight("table", 8, 32), ids], "T", 32, axis=0)
    module = hand.module(hand.node("Mul", "g.m", [found, hand.weight("f", 32)], "T", 32))
    lowered, changed = LOWER_EMBEDDING(module)
    assert changed and ops(lowered) == {"trtc.embedding": 1, "Mul": 1}
    values = np.array([3, 0], np.int32)
    np.testing.assert_array_equal(hand.run(lowered, ids=values), hand.run(module, ids=values))
