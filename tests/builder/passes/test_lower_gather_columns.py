"""builder/passes/lower_gather_columns.py."""

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
from trtc.builder.passes.lower_gather_columns import LOWER_GATHER_COLUMNS


def test_columns_are_gathered_once_for_linears_of_one_order() -> None:
    """v reads its input as it is, and down is given its order by the linears before it."""
    kind = Tiny("int4_gptq", layers=1, scattered="q k o gate up down", bias=True)
    old, new = assert_preserves(LOWER_GATHER_COLUMNS, kind, tolerance=0.0)
    assert ops(old)["Gather"] - ops(new)["Gather"] == 3
    gathers = [given(node) for node in nodes(new, "gather_columns")]
    assert [one["columns"] for one in gathers] == [
        f"layers.0.{linear}.column_order" for linear in ("attention.q", "attention.o", "mlp.gate")
    ]


@pytest.mark.parametrize("case", ["rows", "computed", "fewer"])
def test_other_gathers_are_left_alone(case: str) -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    if case == "rows":
        order = hand.weight("order", 8, dtype="i32")
        out = hand.node("Gather", "g", [x, order], 8, 8, axis=0)
    elif case == "computed":
        out = hand.node("Gather", "g", [x, hand.input("r", 8, dtype="i32")], "T", 8, axis=1)
    else:
        out = hand.node("Gather", "g", [x, hand.weight("o", 4, dtype="i32")], "T", 4, axis=1)
    assert_unchanged(LOWER_GATHER_COLUMNS, hand.module(out))
