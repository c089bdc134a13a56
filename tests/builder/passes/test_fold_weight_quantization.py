"""builder/passes/fold_weight_quantization.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    nodes,
    ops,
    tiny,
)
from trtc.builder.graph_writer import onnx_type
from trtc.builder.passes.fold_weight_quantization import FOLD_WEIGHT_QUANTIZATION
from trtc.protos.dtypes import DTYPES


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_w4a8_weights_become_e4m3_bit_for_bit(dtype: str, zero_points: bool) -> None:
    kind = Tiny("w4a8_awq", zero_points=zero_points, dtype=dtype)  # type: ignore[arg-type]
    old, new = assert_preserves(FOLD_WEIGHT_QUANTIZATION, kind, tolerance=0.0)
    quantized_weights = 2 * 7
    assert ops(old)["QuantizeLinear"] - ops(new)["QuantizeLinear"] == quantized_weights
    assert ops(old)["DequantizeLinear"] - ops(new)["DequantizeLinear"] == quantized_weights
    types = {tensor.data_type for tensor in new.model.graph.initializer}
    assert DTYPES["f8e4m3"].onnx in types
    assert DTYPES["i4"].onnx not in types and DTYPES["u4"].onnx not in types


@pytest.mark.parametrize("scheme", ["fp32", "fp8", "int4_awq"])
def test_other_schemes_are_left_alone(scheme: str) -> None:
    module, _ = tiny(Tiny(scheme))
    assert_unchanged(FOLD_WEIGHT_QUANTIZATION, module)


@pytest.mark.parametrize("case", ["activation", "i8", "per_row"])
def test_what_only_looks_like_it_is_left_alone(case: str) -> None:
    hand = Hand()
    scale = hand.constant("scale", np.full((4, 2), 0.5))
    if case == "activation":
        weight = hand.input("w", 4, 8, dtype="i4")
    else:
        weight = hand.weight("w", 4, 8, dtype="i4")
    rest: dict[str, object] = {"axis": 1, "block_size": 4}
    if case == "per_row":
        scale, rest = hand.constant("rows", np.full(4, 0.5)), {"axis": 0}
    values = hand.node("DequantizeLinear", "dq", [weight, scale], 4, 8, **rest)
    dtype = "i8" if case == "i8" else "f8e4m3"
    second = hand.constant("second", 0.25)
    out = hand.node(
        "QuantizeLinear", "q", [values, second], 4, 8, dtype=dtype, output_dtype=onnx_type(dtype)
    )
    module = hand.module(out)
    assert nodes(module, "QuantizeLinear")
    assert_unchanged(FOLD_WEIGHT_QUANTIZATION, module)
