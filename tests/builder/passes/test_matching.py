"""builder/passes/matching.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import Hand
from trtc.builder.passes.matching import (
    Node,
    dtype_of,
    input_of,
    input_position,
    is_fused,
    is_op,
    is_weight,
    merged_site,
    output_of,
    producer,
    same_recipe,
    site_of,
)
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.recipes import Apply, Concat, Constant, Load, Rows
from trtc.builder.transforms import ScalePerRow


def _product() -> tuple[Rewriter, Node, Node]:
    """x * w, then quantised by a scale."""
    hand = Hand()
    x = hand.input("x", "T", 8)
    product = hand.node("MatMul", "layers.0.mlp.up.matmul", [x, hand.weight("w", 8, 8)], "T", 8)
    quantized = hand.node("quantize", "q", [product], "T", 8, out_dtype="f32")
    rewriter = Rewriter(hand.module(quantized))
    matmul, quantize = rewriter.graph.nodes
    return rewriter, matmul, quantize


def test_operators_are_told_apart_by_domain() -> None:
    _, matmul, quantize = _product()
    assert is_op(matmul, "MatMul") and not is_fused(matmul, "MatMul")
    assert is_fused(quantize, "quantize") and not is_op(quantize, "quantize")
    assert not is_op(None, "MatMul") and not is_fused(None, "quantize")


def test_tensors_know_where_they_come_from() -> None:
    _, matmul, quantize = _product()
    x, weight = matmul.inputs
    assert is_weight(weight) and not is_weight(x)
    assert producer(x) is None
    assert producer(quantize.inputs[0]) is matmul
    assert producer(quantize.inputs[0], "MatMul") is matmul
    assert producer(quantize.inputs[0], "Add") is None


def test_inputs_and_outputs_are_found_by_name() -> None:
    rewriter, _, quantize = _product()
    assert input_of(quantize, "x") is quantize.inputs[0]
    assert input_of(quantize, "out_scale") is None
    scale = rewriter.constant("s", np.array(0.5, np.float32), "f32")
    rewriter.set_input(quantize, "out_scale", scale)
    assert input_of(quantize, "out_scale") is scale
    assert quantize.inputs[input_position(quantize, "out_scale")] is scale
    assert input_of(quantize, "pre_scale") is None, "a gap before a later input"
    assert output_of(quantize, "out") is quantize.outputs[0]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "f8e4m3", "i4", "u8", "i64"])
def test_element_types_have_our_names(dtype: str) -> None:
    hand = Hand()
    module = hand.module(hand.node("Identity", "out", [hand.input("x", 4, dtype=dtype)], 4))
    (tensor,) = Rewriter(module).graph.inputs
    assert dtype_of(tensor) == dtype


def test_a_site_is_the_name_without_its_last_word() -> None:
    _, matmul, _ = _product()
    assert site_of(matmul) == "layers.0.mlp.up"


def test_recipes_are_compared_as_text() -> None:
    array = np.arange(40, dtype=np.float32)
    assert same_recipe(Constant(array), Constant(array.copy()))
    assert not same_recipe(Constant(array), Constant(array + 1))
    assert not same_recipe(Constant(array), Constant(array.astype(np.int32)))
    assert same_recipe(Concat((Load("a"), Load("b"))), Concat((Load("a"), Load("b"))))
    assert not same_recipe(Concat((Load("a"),)), Concat((Load("a"), Load("b"))))
    assert not same_recipe(Load("a"), Rows(Load("a"), 0, 2))
    assert same_recipe(
        Apply(ScalePerRow(2), (Constant(array),)), Apply(ScalePerRow(2), (Constant(array),))
    )
    assert not same_recipe(Apply(ScalePerRow(2), (Load("a"),)), Apply(ScalePerRow(3), (Load("a"),)))


@pytest.mark.parametrize(
    ("sites", "merged"),
    [
        (["l.0.a.q", "l.0.a.k", "l.0.a.v"], "l.0.a.qkv"),
        (["l.0.m.gate", "l.0.m.up"], "l.0.m.gate_up"),
        (["q", "k"], "qk"),
    ],
)
def test_merged_sites(sites: list[str], merged: str) -> None:
    assert merged_site(sites) == merged
