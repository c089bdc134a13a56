"""builder/passes/lower_linears.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    GROUP,
    HIDDEN,
    VOCAB,
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    before,
    given,
    logits,
    nodes,
    ops,
    shape_of,
)
from trtc.builder.graph_writer import Value, onnx_type
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.lower_linears import LOWER_LINEARS
from trtc.builder.recipes import Cast, Load
from trtc.protos.dtypes import DTYPES

GONE = ("MatMul", "Transpose", "QuantizeLinear", "DequantizeLinear")

F32 = [
    Tiny(),
    Tiny(bias=True, fused=True),
    Tiny(gemma=True, tied=True),
    Tiny(experts=4),
    Tiny("fp8", per_tensor=True, dtype="f32"),
    Tiny("fp8", bias=True, equal_input_scales=False, dtype="f32"),
    Tiny("int8_sq", pre_scales=True, dtype="f32"),
    Tiny("w4a8_awq", pre_scales=True, dtype="f32"),
]


@pytest.mark.parametrize("kind", F32, ids=str)
def test_f32_logits_stay(kind: Tiny) -> None:
    _, new = assert_preserves(LOWER_LINEARS, kind, tolerance=2e-6)
    assert not any(ops(new)[op] for op in GONE)
    assert ops(new)["trtc.linear"] == len({n.name for n in nodes(new, "linear")})


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("bf16", bias=True),
        Tiny("bf16", gemma=True),
        Tiny("int4_awq", pre_scales=True),
        Tiny("int4_awq", zero_points=True),
        Tiny("int8_sq"),
        Tiny("fp8"),
    ],
    ids=str,
)
def test_bf16_is_at_least_as_near_to_the_f32_graph(kind: Tiny) -> None:
    """Fewer roundings: the source graph rounds weights and products to bf16, a linear does not."""
    old, reader = before(LOWER_LINEARS, kind)
    new, changed = run_passes(old, [_Alone()])
    assert changed and not any(ops(new)[op] for op in GONE)
    exact_module, exact_reader = before(LOWER_LINEARS, _in_f32(kind))
    exact = logits(exact_module, exact_reader)

    def error(module: Module) -> float:
        return float(np.sqrt(np.mean((logits(module, reader) - exact) ** 2)))

    assert error(new) <= 1.2 * error(old)
    assert error(new) <= 0.05 * float(np.abs(exact).max())


class _Alone:
    name = "lower_linears"
    requires: frozenset[str] = frozenset()

    def __call__(self, module: Module) -> tuple[Module, bool]:
        return LOWER_LINEARS(module)


def _in_f32(kind: Tiny) -> Tiny:
    return Tiny(**{**vars(kind), "dtype": "f32"})


def _linears(kind: Tiny) -> tuple[Module, dict[str, tuple[dict[str, str], dict[str, object]]]]:
    module, _ = before(LOWER_LINEARS, kind)
    module, _ = LOWER_LINEARS(module)
    return module, {n.name: (given(n), attributes(n)) for n in nodes(module, "linear")}


def test_fp8_scales_and_types() -> None:
    module, linears = _linears(Tiny("fp8", per_tensor=True, bias=True))
    inputs, settings = linears["layers.0.mlp.down"]
    assert set(inputs) == {"x", "weight", "weight_scale", "input_scale", "bias"}
    assert shape_of(module, inputs["weight_scale"]) == (HIDDEN, 1)
    assert settings["weight_dtype"] == "f8e4m3" and settings["out_dtype"] == "bf16"
    quantize = {n.name: n for n in nodes(module, "quantize")}["layers.0.mlp.down.quantize"]
    assert given(quantize)["out_scale"] == inputs["input_scale"]
    assert attributes(quantize)["out_dtype"] == "f8e4m3"
    bias = next(t for t in module.model.graph.initializer if t.name == inputs["bias"])
    assert bias.data_type == DTYPES["f32"].onnx


def test_groups_and_zero_points() -> None:
    module, linears = _linears(Tiny("int4_awq", zero_points=True))
    inputs, settings = linears["layers.0.attention.q"]
    assert settings["group_size"] == GROUP and settings["weight_dtype"] == "u4"
    assert shape_of(module, inputs["weight_zero"]) == (HIDDEN, HIDDEN // GROUP)
    assert shape_of(module, inputs["weight_scale"]) == (HIDDEN, HIDDEN // GROUP)


def test_logits_are_f32_and_capped_in_the_linear() -> None:
    module, linears = _linears(Tiny("bf16", gemma=True))
    _, settings = linears["lm_head"]
    assert settings["softcap"] == 4.0 and settings["out_dtype"] == "f32" and settings["N"] == VOCAB
    assert nodes(module, "linear")[-1].output[0] == "logits"
    assert not nodes(module, "Tanh")


def test_q_and_k_stay_bf16_where_the_rope_widens_them() -> None:
    module, linears = _linears(Tiny("bf16"))
    assert linears["layers.0.attention.q"][1]["out_dtype"] == "bf16"
    assert len(nodes(module, "Cast")) > 1


def test_bf16_router_multiplies_bf16_and_gives_f32() -> None:
    module, linears = _linears(Tiny("bf16", experts=4))
    inputs, settings = linears["layers.0.mlp.router"]
    assert settings["weight_dtype"] == "bf16" and settings["out_dtype"] == "f32"
    assert inputs["x"] == "layers.0.mlp_norm.out"
    assert module.recipes[inputs["weight"]] == Cast(
        Cast(Cast(Load("layers.0.router.weight"), "bf16"), "f32"), "bf16"
    )


@pytest.mark.parametrize(
    "case", ["two activations", "f32 by i4", "untransposed", "asymmetric", "3-D"]
)
def test_what_no_kernel_multiplies_is_left_alone(case: str) -> None:
    assert_unchanged(LOWER_LINEARS, _odd_product(case))


def _odd_product(case: str) -> Module:
    hand = Hand()
    x = hand.input("x", "T", 8)
    if case == "two activations":
        return hand.module(_product(hand, x, hand.input("y", 8, 4)))
    if case == "f32 by i4":
        scale = hand.constant("scale", np.full((4, 2), 0.5))
        packed = hand.weight("w", 4, 8, dtype="i4")
        weight = hand.node("DequantizeLinear", "dq", [packed, scale], 4, 8, axis=1, block_size=4)
        return hand.module(_product(hand, x, hand.transposed(weight)))
    if case == "untransposed":
        return hand.module(_product(hand, x, hand.weight("w", 8, 4)))
    if case == "asymmetric":
        x = _asymmetric(hand, x)
        scale = hand.constant("row_scales", np.full(4, 0.5))
        stored = hand.weight("w", 4, 8, dtype="i8")
        weight = hand.node("DequantizeLinear", "dq", [stored, scale], 4, 8, axis=0)
        return hand.module(_product(hand, x, hand.transposed(weight)))
    cube = hand.input("cube", 2, "T", 8)
    weight = hand.transposed(hand.weight("w", 4, 8))
    return hand.module(hand.node("MatMul", "y.matmul", [cube, weight], 2, "T", 4))


def test_an_f32_weight_that_bf16_cannot_hold_is_not_narrowed() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8, dtype="bf16")
    wide = hand.node("Cast", "wide", [x], "T", 8, to=onnx_type("f32"))
    module = hand.module(_product(hand, wide, hand.transposed(hand.weight("w", 4, 8))))
    lowered, changed = LOWER_LINEARS(module)
    assert changed and ops(lowered) == {"Cast": 1, "trtc.linear": 1}
    assert given(nodes(lowered, "linear")[0])["weight"] == "w"


def _asymmetric(hand: Hand, x: Value) -> Value:
    scale, zero = hand.constant("x_scale", 0.1), hand.constant("x_zero", 3, "i8")
    stored = hand.node("QuantizeLinear", "xq", [x, scale, zero], "T", 8, dtype="i8")
    return hand.node("DequantizeLinear", "xdq", [stored, scale, zero], "T", 8)


def _product(hand: Hand, x: Value, weight: Value) -> Value:
    return hand.node("MatMul", "y.matmul", [x, weight], "T", 4)


def test_bias_of_another_shape_and_shared_products_stay_outside() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    product = _product(hand, x, hand.transposed(hand.weight("w", 4, 8)))
    shifted = hand.node("Add", "y.shift", [product, hand.constant("one", 1.0)], "T", 4)
    module = hand.module(shifted, product)
    lowered, changed = LOWER_LINEARS(module)
    assert changed and ops(lowered) == {"trtc.linear": 1, "Add": 1}
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for expected, found in zip(
        hand.run(module, x=values), hand.run(lowered, x=values), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
