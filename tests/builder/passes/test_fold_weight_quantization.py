"""builder/passes/fold_weight_quantization.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
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


@pytest.mark.parametrize(
    "case", ["activation", "computed scale", "computed second", "i8", "per_row", "f8 codes", "rows"]
)
def test_what_only_looks_like_it_is_left_alone(case: str) -> None:
    hand = Hand()
    codes = "f8e4m3" if case == "f8 codes" else "i4"
    make = hand.input if case == "activation" else hand.weight
    weight = make("w", 8, 8, dtype=codes)
    scale = hand.constant("scale", np.full((8, 2), 0.5))
    second = hand.input("second") if case == "computed second" else hand.constant("second", 0.25)
    if case == "computed scale":
        scale = hand.input("computed", 8, 2)
    settings = {"axis": 1, "block_size": 4}
    if case == "per_row":
        scale, settings = hand.constant("by_row", np.full(8, 0.5)), {"axis": 0}
    if case == "rows":
        scale = hand.constant("by_rows", np.full((2, 8), 0.5))
        settings = {"axis": 0, "block_size": 4}
    values = hand.node("DequantizeLinear", "dq", [weight, scale], 8, 8, **settings)
    dtype = "i8" if case == "i8" else "f8e4m3"
    out = hand.node(
        "QuantizeLinear", "q", [values, second], 8, 8, dtype=dtype, output_dtype=onnx_type(dtype)
    )
    assert_unchanged(FOLD_WEIGHT_QUANTIZATION, hand.module(out))
