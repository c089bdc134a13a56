"""builder/passes/fuse_gated_linear.py."""

from dataclasses import replace

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    HIDDEN,
    WIDTH,
    Hand,
    Tensors,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    before,
    given,
    logits,
    nodes,
    ops,
    scheme_of,
    shape_of,
    tiny,
)
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.fuse_gated_linear import FUSE_GATED_LINEAR
from trtc.builder.passes.fuse_row_quantize import FUSE_ROW_QUANTIZE
from trtc.builder.passes.order import cuda_passes


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("fp8"),
        Tiny("fp8", per_tensor=True, fused=True),
        Tiny("fp8", gemma=True),
        Tiny("w4a8_awq"),
        Tiny("bf16"),
        Tiny("bf16", gemma=True),
    ],
    ids=str,
)
def test_gate_up_and_their_activation_become_one(kind: Tiny) -> None:
    """Without rounding to bf16 in between some values fall to their other neighbour, which in E4M3
    and so small a model is much: as a whole the result must be as near to f32's as it was."""
    old, new = assert_preserves(FUSE_GATED_LINEAR, kind, tolerance=0.2)
    exact = logits(*tiny(replace(kind, dtype="f32")))
    reader = tiny(kind)[1]
    before_it, after_it = (np.square(logits(one, reader) - exact).mean() for one in (old, new))
    assert after_it < 1.1 * before_it
    assert ops(old)["trtc.swiglu"] == ops(new)["trtc.gated_linear"] == kind.layers
    assert ops(new)["trtc.swiglu"] == 0
    assert ops(old)["trtc.linear"] - ops(new)["trtc.linear"] == kind.layers
    assert ops(old)["Split"] - ops(new)["Split"] == kind.layers
    node = nodes(new, "gated_linear")[0]
    assert node.name == "layers.0.mlp.gate_up"
    assert attributes(node) == {
        "I": WIDTH,
        "weight_dtype": "bf16" if kind.scheme == "bf16" else "f8e4m3",
        "activation": "gelu_tanh" if kind.gemma else "silu",
        "scales": 0,
    }
    scales = set() if kind.scheme == "bf16" else {"weight_scale", "input_scale", "out_scale"}
    assert set(given(node)) == {"x", "weight", *scales}


@pytest.mark.parametrize("gemma", [False, True])
def test_rows_of_x_and_of_the_result_may_have_scales(gemma: bool) -> None:
    kind = Tiny("fp8_dynamic", gemma=gemma)
    old, reader = with_scales_of_rows(kind)
    new, changed = FUSE_GATED_LINEAR(old)
    assert changed and ops(new)["trtc.gated_linear"] == kind.layers
    exact = logits(*tiny(replace(kind, dtype="f32")))
    before_it, after_it = (np.square(logits(one, reader) - exact).mean() for one in (old, new))
    assert after_it < 1.2 * before_it
    for node in nodes(new, "gated_linear"):
        assert attributes(node)["scales"] == 1
        assert set(given(node)) == {"x", "weight", "weight_scale", "row_scale"}
        (down,) = (one for one in nodes(new, "linear") if given(one)["x"] == node.output[0])
        assert given(down)["row_scale"] == node.output[1]


@pytest.mark.parametrize("scheme", ["fp8_blocks", "int8_dynamic"])
def test_scales_of_groups_and_int8_stay(scheme: str) -> None:
    assert_unchanged(FUSE_GATED_LINEAR, with_scales_of_rows(Tiny(scheme))[0])


def with_scales_of_rows(kind: Tiny) -> tuple[Module, Tensors]:
    """As the pass finds a model whose activations are quantised by row."""
    module, reader = before(FUSE_ROW_QUANTIZE, kind)
    return FUSE_ROW_QUANTIZE(module)[0], reader


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("fp32"),
        Tiny("int8_sq"),
        Tiny("fp8", dtype="f32"),
        Tiny("fp8", experts=4),
        Tiny("fp8", equal_input_scales=False),
    ],
    ids=str,
)
def test_other_models_stay(kind: Tiny) -> None:
    """Other types and products that are not rounded to bf16, experts, and two linears."""
    module, _ = before(FUSE_GATED_LINEAR, kind)
    assert_unchanged(FUSE_GATED_LINEAR, module)


@pytest.mark.parametrize(
    "case", ["", "bias", "pre-scale", "halves turned", "unequal use", "read elsewhere", "other out"]
)
@pytest.mark.parametrize("dtype", ["f8e4m3", "bf16"])
def test_what_must_hold(dtype: str, case: str) -> None:
    module = hand(dtype, case)
    if case:
        assert_unchanged(FUSE_GATED_LINEAR, module)
    else:
        new, changed = FUSE_GATED_LINEAR(module)
        assert changed and ops(new) == {"trtc.gated_linear": 1}


def test_bf16_with_a_scale_stays() -> None:
    assert_unchanged(FUSE_GATED_LINEAR, hand("bf16", "scale"))


def hand(dtype: str, case: str) -> Module:
    """linear, Split and swiglu as the pass takes them, but for what `case` says."""
    graph, is_quantized = Hand(), dtype == "f8e4m3"
    weight = graph.weight("w", 2 * WIDTH, HIDDEN, dtype=dtype)
    scale = graph.weight("s", 2 * WIDTH, 1) if is_quantized or case == "scale" else None
    one = graph.constant("one", 0.5)
    bias = graph.weight("b", 2 * WIDTH) if case == "bias" else None
    x = graph.input("x", "T", HIDDEN, dtype=dtype)
    product = graph.node(
        "linear", "l", [x, weight, scale, None, one if is_quantized else None, bias], "T",
        2 * WIDTH, dtype="bf16", N=2 * WIDTH, group_size=0, weight_dtype=dtype,
        layout="row_major", activation="exact", softcap=0.0, out_dtype="bf16",
    )  # fmt: skip
    sizes = graph.constant("sizes", [WIDTH, WIDTH], "i64")
    halves = (Value("gate", "bf16", ("T", WIDTH)), Value("up", "bf16", ("T", WIDTH)))
    gate, up = graph.writer.node_of_two(
        "Split", "split", [product, sizes], halves, domain="", axis=1
    )
    if case == "halves turned":
        gate, up = up, gate
    if case == "unequal use":
        up = gate
    pre_scale = graph.weight("p", WIDTH) if case == "pre-scale" else None
    gives_e4m3 = is_quantized != (case == "other out")
    out_dtype = "f8e4m3" if gives_e4m3 else "bf16"
    out = graph.node(
        "swiglu", "g", [gate, up, pre_scale, one if gives_e4m3 else None], "T", WIDTH,
        dtype=out_dtype, activation="silu", out_dtype=out_dtype,
    )  # fmt: skip
    return graph.module(*([out, gate] if case == "read elsewhere" else [out]))


@pytest.mark.parametrize("scheme", ["fp8", "bf16"])
def test_each_of_several_ranks_has_some_columns_of_both(scheme: str) -> None:
    kind = Tiny(scheme)
    module, reader = tiny(kind)
    sharded, _ = run_passes(module, cuda_passes(scheme_of(kind), reader, ranks=2))
    assert ops(sharded)["trtc.gated_linear"] == kind.layers and not ops(sharded)["trtc.swiglu"]
    for node in nodes(sharded, "gated_linear"):
        assert attributes(node)["I"] == WIDTH // 2
        assert shape_of(sharded, given(node)["weight"]) == (WIDTH, HIDDEN)
