"""builder/passes/share_quantize.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    before,
    ops,
    tiny,
)
from trtc.builder.passes.share_quantize import SHARE_QUANTIZE


@pytest.mark.parametrize("scheme", ["fp8", "int8_sq"])
def test_q_k_v_and_gate_up_read_one_quantised_tensor(scheme: str) -> None:
    old, new = assert_preserves(SHARE_QUANTIZE, Tiny(scheme), tolerance=0.0)
    assert ops(old)["trtc.quantize"] == 2 * 7
    assert ops(new)["trtc.quantize"] == 2 * 4


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("fp8", equal_input_scales=False),
        Tiny("int8_sq", pre_scales=True),
        Tiny("int4_awq", pre_scales=True),
        Tiny(),
    ],
    ids=str,
)
def test_different_scales_are_kept_apart(kind: Tiny) -> None:
    module, _ = before(SHARE_QUANTIZE, kind)
    assert_unchanged(SHARE_QUANTIZE, module)


def test_source_graphs_have_none() -> None:
    module, _ = tiny(Tiny("fp8"))
    assert_unchanged(SHARE_QUANTIZE, module)


@pytest.mark.parametrize("is_same_text", [True, False])
def test_large_pre_scales_are_equal_only_by_recipe(is_same_text: bool) -> None:
    hand = Hand()
    x = hand.input("x", "T", 32)
    first = hand.weight("a", 32)
    second = hand.weight("b", 32, recipe=hand.writer._recipes["a"] if is_same_text else None)
    outs = [
        hand.node("quantize", name, [x, scale], "T", 32, out_dtype="f32")
        for name, scale in (("qa", first), ("qb", second))
    ]
    both = hand.node("add", "sum", outs, "T", 32)
    module = hand.module(both)
    if not is_same_text:
        assert_unchanged(SHARE_QUANTIZE, module)
        return
    shared, changed = SHARE_QUANTIZE(module)
    assert changed and ops(shared)["trtc.quantize"] == 1
    assert set(shared.recipes) == {"a"}
    values = np.ones((2, 32), np.float32)
    np.testing.assert_array_equal(hand.run(shared, x=values), hand.run(module, x=values))


def test_graph_outputs_keep_their_name() -> None:
    hand = Hand()
    x = hand.input("x", "T", 4)
    scale = hand.constant("scale", 0.5)
    outs = [
        hand.node("quantize", name, [x, None, scale], "T", 4, dtype="i8", out_dtype="i8")
        for name in ("first", "second")
    ]
    assert_unchanged(SHARE_QUANTIZE, hand.module(*outs))


def test_different_types_are_kept_apart() -> None:
    hand = Hand()
    x, scale = hand.input("x", "T", 4), hand.constant("scale", 0.5)
    first, second = (
        hand.node("quantize", dtype, [x, None, scale], "T", 4, dtype=dtype, out_dtype=dtype)
        for dtype in ("i8", "f8e4m3")
    )
    outs = [
        hand.node("DequantizeLinear", f"{value.name}.dq", [value, scale], "T", 4)
        for value in (first, second)
    ]
    assert_unchanged(SHARE_QUANTIZE, hand.module(*outs))
