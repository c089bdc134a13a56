"""builder/passes/pack_weights.py."""

import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    given,
    nodes,
    shape_of,
    tiny,
)
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.protos.dtypes import DTYPES


@pytest.mark.parametrize(
    "kind",
    [
        Tiny(),
        Tiny("bf16", tied=True),
        Tiny("fp8"),
        Tiny("int8_sq"),
        Tiny("int4_awq", zero_points=True),
        Tiny("int4_awq"),
        Tiny("w4a8_awq"),
        Tiny("fp8", experts=3),
        Tiny("int4_awq", experts=3),
    ],
    ids=str,
)
def test_packed_weights_are_the_same_weights(kind: Tiny) -> None:
    _, new = assert_preserves(PACK_WEIGHTS, kind, tolerance=0.0)
    types = {tensor.name: tensor.data_type for tensor in new.model.graph.initializer}
    packed = [given(node)["weight"] for node in nodes(new, "linear")]
    packed += [given(node)[name] for node in nodes(new, "moe") for name in ("gate_up", "down")]
    _, reader = tiny(kind)
    for name in packed:
        assert types[name] == DTYPES["u8"].onnx
        # The size was stated without loading the weight.
        assert shape_of(new, name) == new.recipes[name].load(reader).shape
    assert all(
        attributes(node)["layout"] == "packed"
        for op in ("linear", "moe")
        for node in nodes(new, op)
    )


def test_a_tied_table_stays_row_major_for_the_lookup() -> None:
    _, new = assert_preserves(PACK_WEIGHTS, Tiny(tied=True), tolerance=0.0)
    assert given(nodes(new, "embedding")[0])["table"] == "embedding.weight"
    assert given(nodes(new, "linear")[-1])["weight"] == "embedding.weight.packed"


def test_packed_once() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    out = hand.node("add", "sum", [x, x], "T", 8)
    assert_unchanged(PACK_WEIGHTS, hand.module(out))
