"""builder/passes/join_columns.py."""

from typing import Any

import numpy as np
import pytest

from tests.builder.passes.tiny import Hand, assert_unchanged, nodes
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.join_columns import JOIN_COLUMNS
from trtc.builder.passes.merge_linears import MERGE_LINEARS
from trtc.protos.errors import UnsupportedError

WIDTHS = {"q": 4, "k": 4, "v": 8}


def linears(hand: Hand, x: Value, widths: dict[str, int], **settings: Any) -> list[Value]:
    found = []
    for name, columns in widths.items():
        weight = hand.weight(f"m.{name}.weight", columns, 8)
        fixed = {"N": columns, "weight_dtype": "f32", "out_dtype": "f32", **settings}
        found.append(hand.node("linear", f"m.{name}", [x, weight], "T", columns, **fixed))
    return found


def doubled(hand: Hand, name: str, x: Value) -> Value:
    return hand.node("add", name, [x, x], *x.shape)


def joined(*, before: bool = False, behind: bool = False) -> tuple[Hand, Module, Module]:
    """q, k and v read as one tensor, beside other linears of their input; after merge_linears, and
    after the pass."""
    hand = Hand()
    x = hand.input("x", "T", 8)
    first = linears(hand, x, {"a": 4}) if before else []
    parts = linears(hand, x, WIDTHS)
    last = linears(hand, x, {"z": 12}) if behind else []
    whole = hand.node("Concat", "m.joined", parts, "T", sum(WIDTHS.values()), axis=1)
    read = [*first, whole, *last]
    given = hand.module(*(doubled(hand, f"m.{i}", one) for i, one in enumerate(read)))
    merged, changed = MERGE_LINEARS(given)
    assert changed
    result, changed = JOIN_COLUMNS(merged)
    assert changed and not nodes(result, "Concat") and len(nodes(result, "linear")) == 1
    assert_unchanged(JOIN_COLUMNS, result)
    values = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    for one, other in zip(hand.run(given, x=values), hand.run(result, x=values), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    return hand, merged, result


@pytest.mark.parametrize(
    ("before", "behind", "views"), [(True, True, 3), (True, False, 2), (False, True, 2)]
)
def test_neighbouring_views_become_one(before: bool, behind: bool, views: int) -> None:
    _, _, result = joined(before=before, behind=behind)
    (split,) = nodes(result, "Split")
    assert len(split.output) == views


def test_a_whole_product_needs_no_view() -> None:
    _, _, result = joined()
    assert not nodes(result, "Split")


@pytest.mark.parametrize("case", ["apart", "order", "read"])
def test_what_is_no_part_of_one_product_is_refused(case: str) -> None:
    """Products that were not merged, views in another order, and one that something else reads."""
    hand = Hand()
    x = hand.input("x", "T", 8)
    q, k = linears(hand, x, {"q": 4, "k": 4})
    v = linears(hand, x, {"v": 8}, softcap=2.0 if case == "apart" else 0.0)
    parts = [k, q, *v] if case == "order" else [q, k, *v]
    whole = hand.node("Concat", "m.joined", parts, "T", 16, axis=1)
    outs = [doubled(hand, "m.out", whole)]
    if case == "read":
        outs.append(doubled(hand, "m.other", k))
    merged, _ = MERGE_LINEARS(hand.module(*outs))
    with pytest.raises(UnsupportedError, match=r"m\.joined: its parts are read as one product"):
        JOIN_COLUMNS(merged)
