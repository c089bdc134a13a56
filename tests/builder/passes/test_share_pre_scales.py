"""builder/passes/share_pre_scales.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tensors,
    Tiny,
    assert_same_function,
    assert_unchanged,
    nodes,
    tiny,
)
from trtc.builder.passes.share_pre_scales import share_pre_scales


@pytest.mark.parametrize("scheme", ["int8_sq", "w4a8_awq"])
def test_equal_pre_scales_become_one_weight(scheme: str) -> None:
    module, reader = tiny(Tiny(scheme, pre_scales=True, equal_pre_scales=True))
    step = share_pre_scales(reader)
    shared, changed = step(module)
    assert changed
    assert_same_function(module, shared, reader, tolerance=0.0)
    scales = {node.name: node.input[1] for node in nodes(shared, "Mul")}
    at = "layers.0.attention"
    assert {scales[f"{at}.{part}.pre_scale"] for part in "qkv"} == {f"{at}.q.pre_scale"}
    # Equal values for another input stay a weight of their own: nothing could share them.
    assert scales[f"{at}.o.pre_scale"] == f"{at}.o.pre_scale"
    assert len(module.recipes) - len(shared.recipes) == 2 * 3
    assert_unchanged(step, shared)


@pytest.mark.parametrize(
    "kind", [Tiny(), Tiny("int8_sq"), Tiny("int8_sq", pre_scales=True)], ids=str
)
def test_other_models_are_left_alone(kind: Tiny) -> None:
    module, reader = tiny(kind)
    assert_unchanged(share_pre_scales(reader), module)


def test_equal_values_for_different_inputs_are_kept_apart() -> None:
    hand = Hand()
    x, y = hand.input("x", "T", 32), hand.input("y", "T", 32)
    hand.reader.tensors = {"a": np.ones(32, np.float32), "b": np.ones(32, np.float32)}
    first = hand.node("Mul", "m.a", [x, hand.weight("a", 32)], "T", 32)
    second = hand.node("Mul", "m.b", [y, hand.weight("b", 32)], "T", 32)
    assert_unchanged(share_pre_scales(hand.reader), hand.module(first, second))


def test_only_vectors_are_read() -> None:
    hand = Hand()
    x = hand.input("x", "T", 32)
    outs = [hand.node("Mul", f"m.{name}", [x, hand.weight(name, 32, 32)], 32, 32) for name in "ab"]
    outs += [hand.node("Mul", f"m.{name}", [x, hand.input(name, 32)], "T", 32) for name in "cd"]
    reader = Tensors()  # It knows no shape: reading anything is an error.
    assert_unchanged(share_pre_scales(reader), hand.module(*outs))
