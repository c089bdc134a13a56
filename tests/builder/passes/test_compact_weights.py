"""builder/passes/compact_weights.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Tiny,
    assert_unchanged,
    attributes,
    before,
    given,
    logits,
    nodes,
    shape_of,
)
from trtc.builder.passes.compact_weights import COMPACT_WEIGHTS
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.plugins.compact import compact_bytes


@pytest.mark.parametrize(
    "kind",
    [Tiny("bf16", bias=True), Tiny("bf16", tied=True, gemma=True), Tiny("bf16", experts=4)],
    ids=str,
)
def test_bf16_weights_become_compact(kind: Tiny) -> None:
    """The model stays the same, but for a weight in thousands that is too small to be seen."""
    old, reader = before(COMPACT_WEIGHTS, kind)
    new, changed = COMPACT_WEIGHTS(old)
    assert changed
    for op, weights in (("linear", ("weight",)), ("moe", ("gate_up", "down"))):
        for was, node in zip(nodes(old, op), nodes(new, op), strict=True):
            assert attributes(node)["layout"] == "compact"
            for name in weights:
                *experts, rows, depth = shape_of(old, given(was)[name])
                (size,) = shape_of(new, given(node)[name])
                assert size == compact_bytes(rows, depth) * (experts[0] if experts else 1)
                assert shape_of(new, given(node)[f"{name}_scale"]) == (*experts, rows, 1)
    assert given(nodes(new, "embedding")[0]) == given(nodes(old, "embedding")[0])
    expected, found = logits(old, reader), logits(new, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert error < 2e-3
    assert_unchanged(COMPACT_WEIGHTS, new)
    assert_unchanged(PACK_WEIGHTS, new)


@pytest.mark.parametrize("scheme", ["fp32", "int8_sq"])
def test_other_weights_stay(scheme: str) -> None:
    module, _ = before(COMPACT_WEIGHTS, Tiny(scheme))
    new, _ = COMPACT_WEIGHTS(module)
    layouts = [attributes(node)["layout"] for node in nodes(new, "linear")]
    *layers, head = layouts
    assert set(layers) == {"row_major"}
    assert head == ("row_major" if scheme == "fp32" else "compact")
