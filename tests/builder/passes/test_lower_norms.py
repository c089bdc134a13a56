"""builder/passes/lower_norms.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    HIDDEN,
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    given,
    nodes,
    ops,
    shape_of,
)
from trtc.builder.passes.lower_norms import LOWER_NORMS
from trtc.protos.dtypes import DTYPES


@pytest.mark.parametrize(
    "kind",
    [Tiny(), Tiny("bf16"), Tiny(gemma=True), Tiny("bf16", gemma=True), Tiny(head_norm=True)],
    ids=str,
)
def test_norms_have_f32_weights(kind: Tiny) -> None:
    _, new = assert_preserves(LOWER_NORMS, kind, tolerance=0.0)
    norms = nodes(new, "rms_norm")
    assert len(norms) == (2 * 4 if kind.gemma else 2 * 2) + 1
    assert ops(new)["RMSNormalization"] == 0
    types = {tensor.name: tensor.data_type for tensor in new.model.graph.initializer}
    for node in norms:
        assert set(given(node)) == {"x", "weight"}
        assert types[given(node)["weight"]] == DTYPES["f32"].onnx
        assert shape_of(new, given(node)["weight"]) == (HIDDEN,)
        assert attributes(node)["eps"] == pytest.approx(1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms_are_centered_ones(has_bias: bool) -> None:
    hand = Hand()
    inputs = [hand.input("x", "T", 8), hand.weight("w", 8)]
    inputs += [hand.weight("b", 8)] if has_bias else []
    settings = {"axis": -1, "epsilon": 1e-2, "stash_type": 1}
    whole = hand.module(hand.node("LayerNormalization", "n", inputs, "T", 8, **settings))
    lowered, changed = LOWER_NORMS(whole)
    assert changed and ops(lowered) == {"trtc.rms_norm": 1}
    (node,) = nodes(lowered, "rms_norm")
    assert attributes(node)["centered"] == 1
    assert ("bias" in given(node)) == has_bias
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32) + 4
    for before, after in zip(hand.run(whole, x=x), hand.run(lowered, x=x), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("case", ["heads", "computed weight"])
def test_other_norms_are_left_alone(case: str) -> None:
    hand = Hand()
    settings = {"axis": -1, "epsilon": 1e-6, "stash_type": 1}
    if case == "heads":
        inputs = [hand.input("x", "T", 4, 8), hand.weight("w", 8)]
        out = hand.node("RMSNormalization", "n", inputs, "T", 4, 8, **settings)
    else:
        inputs = [hand.input("x", "T", 8), hand.input("w", 8)]
        out = hand.node("RMSNormalization", "n", inputs, "T", 8, **settings)
    assert_unchanged(LOWER_NORMS, hand.module(out))
