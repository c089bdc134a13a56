"""builder/passes/drop_e4m3_rounding.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import Hand, Tiny, assert_unchanged, logits, nodes, ops, tiny
from trtc.builder.graph_writer import onnx_type
from trtc.builder.passes.drop_e4m3_rounding import DROP_E4M3_ROUNDING


@pytest.mark.parametrize("kind", [Tiny("fp8"), Tiny("w4a8_awq"), Tiny("fp8_blocks")], ids=str)
def test_products_read_what_was_rounded(kind: Tiny) -> None:
    """A stated departure: near, and not equal."""
    old, reader = tiny(kind)
    new, changed = DROP_E4M3_ROUNDING(old)
    assert changed
    assert ops(new)["QuantizeLinear"] == 0
    assert ops(new)["DequantizeLinear"] == 2 * 7
    expected, found = logits(old, reader), logits(new, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 0 < error < 0.3
    assert_unchanged(DROP_E4M3_ROUNDING, new)


@pytest.mark.parametrize("scheme", ["fp32", "int8_sq", "int4_awq", "int8_dynamic"])
def test_other_schemes_are_left_alone(scheme: str) -> None:
    module, _ = tiny(Tiny(scheme))
    assert_unchanged(DROP_E4M3_ROUNDING, module)


@pytest.mark.parametrize("case", ["int8", "scaled", "widened"])
def test_what_only_looks_like_it_is_left_alone(case: str) -> None:
    hand = Hand()
    code = "i8" if case == "int8" else "f8e4m3"
    x = hand.input("x", "T", 8)
    scale = hand.constant("scale", 0.5)
    other = hand.constant("other", 0.25) if case == "scaled" else scale
    codes = hand.node(
        "QuantizeLinear", "q", [x, scale], "T", 8, dtype=code, output_dtype=onnx_type(code)
    )
    dtype = "bf16" if case == "widened" else "f32"
    out = hand.node(
        "DequantizeLinear", "dq", [codes, other], "T", 8, dtype=dtype, output_dtype=onnx_type(dtype)
    )
    module = hand.module(out)
    assert nodes(module, "DequantizeLinear")
    assert_unchanged(DROP_E4M3_ROUNDING, module)
