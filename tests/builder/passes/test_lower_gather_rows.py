"""builder/passes/lower_gather_rows.py."""

import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    given,
    nodes,
    ops,
)
from trtc.builder.passes.lower_gather_rows import LOWER_GATHER_ROWS


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
def test_logit_rows_are_gathered(scheme: str) -> None:
    _, new = assert_preserves(LOWER_GATHER_ROWS, Tiny(scheme), tolerance=0.0)
    assert ops(new)["Gather"] == 0
    (node,) = nodes(new, "gather_rows")
    assert given(node) == {"x": "layers.1.mlp.residual.out", "rows": "logit_rows"}


@pytest.mark.parametrize("case", ["table", "columns", "cube"])
def test_other_gathers_are_left_alone(case: str) -> None:
    hand = Hand()
    rows = hand.input("rows", "R", dtype="i32")
    if case == "table":
        out = hand.node("Gather", "g", [hand.weight("table", 8, 32), rows], "R", 32, axis=0)
    elif case == "columns":
        out = hand.node("Gather", "g", [hand.input("x", "T", 8), rows], "T", "R", axis=1)
    else:
        out = hand.node("Gather", "g", [hand.input("x", "T", 2, 8), rows], "R", 2, 8, axis=0)
    assert_unchanged(LOWER_GATHER_ROWS, hand.module(out))
