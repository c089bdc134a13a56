"""builder/passes/lower_linears.py."""

from collections.abc import Callable

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
    dtype_of,
    given,
    logits,
    nodes,
    ops,
    shape_of,
    tiny,
)
from trtc.builder.graph_writer import Value, onnx_type
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.lower_linears import LOWER_LINEARS
from trtc.builder.passes.merge_linears import MERGE_LINEARS
from trtc.builder.passes.order import NATIVE_PASSES
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.builder.recipes import Cast, Load, Recipe, Reshape
from trtc.builder.transforms import E4m3Bits
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import CheckpointError

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
DYNAMIC = [
    Tiny("fp8_dynamic", bias=True, dtype="f32"),
    Tiny("int8_dynamic", pre_scales=True, dtype="f32"),
    Tiny("fp8_blocks", fused=True, dtype="f32"),
    Tiny("fp8_blocks", experts=4, dtype="f32"),
]


@pytest.mark.parametrize("kind", F32, ids=str)
def test_f32_logits_stay(kind: Tiny) -> None:
    _, new = assert_preserves(LOWER_LINEARS, kind, tolerance=2e-6)
    assert not any(ops(new)[op] for op in GONE)
    assert ops(new)["trtc.linear"] == len({n.name for n in nodes(new, "linear")})


@pytest.mark.parametrize("kind", DYNAMIC, ids=str)
def test_rows_have_scales_of_their_own(kind: Tiny) -> None:
    """A number between two codes may go to the other where sums are in another order."""
    old, new = assert_preserves(LOWER_LINEARS, kind, tolerance=0.05)
    _, reader = before(LOWER_LINEARS, kind)
    expected = logits(old, reader)
    error = np.abs(logits(new, reader) - expected) / np.abs(expected).max()
    assert np.median(error) < 2e-6
    linears = {node.name: given(node) for node in nodes(new, "linear")}
    quantized = linears["layers.0.attention.o"]
    scales = HIDDEN // GROUP if kind.scheme == "fp8_blocks" else 1
    quantize = next(n for n in nodes(new, "quantize") if n.output[1] == quantized["row_scale"])
    assert attributes(quantize)["scales"] == scales
    assert "input_scale" not in quantized and "row_scale" not in linears["lm_head"]


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("bf16", bias=True),
        Tiny("bf16", gemma=True),
        Tiny("int4_awq", pre_scales=True),
        Tiny("int4_awq", zero_points=True),
        Tiny("iq4", bias=True),
        Tiny("iq4", experts=4),
        Tiny("nvfp4_weights", bias=True),
        Tiny("mxfp4_weights", experts=4),
        Tiny("int6_g128", bias=True),
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


def test_e4m3_scales_stay_bytes_in_a_unit_a_row() -> None:
    module, linears = _linears(Tiny("nvfp4_weights"))
    inputs, settings = linears["layers.0.attention.q"]
    assert (settings["weight_dtype"], settings["group_size"]) == ("f4e2m1", GROUP)
    assert dtype_of(module, inputs["weight_scale"]) == "u8"
    assert shape_of(module, inputs["scale_unit"]) == (HIDDEN,)
    merged, _ = MERGE_LINEARS(module)
    q, k, v = (linears[f"layers.0.attention.{name}"][0]["scale_unit"] for name in "qkv")
    _, reader = tiny(Tiny("nvfp4_weights"))
    units = [module.recipes[name].load(reader) for name in (q, k, v)]
    assert len({float(one[0]) for one in units}) == 3
    (qkv,) = (
        given(n) for n in nodes(merged, "linear") if n.name.startswith("layers.0.attention.qkv")
    )
    joined = merged.recipes[qkv["scale_unit"]].load(reader)
    np.testing.assert_array_equal(joined, np.concatenate(units))


def test_exponents_stay_bytes_without_a_unit() -> None:
    module, linears = _linears(Tiny("mxfp4_weights"))
    inputs, settings = linears["layers.0.attention.q"]
    assert (settings["weight_dtype"], settings["group_size"]) == ("f4e2m1", GROUP)
    assert dtype_of(module, inputs["weight_scale"]) == "u8"
    assert shape_of(module, inputs["weight_scale"]) == (HIDDEN, HIDDEN // GROUP)
    assert "scale_unit" not in inputs


def test_experts_have_e4m3_scales_as_bytes_in_a_unit_a_row() -> None:
    kind = Tiny("nvfp4_weights", experts=3, layers=1)
    module, reader = tiny(kind)
    (moe,) = nodes(module, "moe")
    inputs, settings = given(moe), attributes(moe)
    assert (settings["weight_dtype"], settings["group_size"]) == ("f4e2m1", GROUP)
    for name, linears in (("gate_up", ("gate", "up")), ("down", ("down",))):
        assert dtype_of(module, inputs[f"{name}_scale"]) == "u8"
        units = module.recipes[inputs[f"{name}_scale_unit"]].load(reader)
        scales = module.recipes[inputs[f"{name}_scale"]].load(reader)
        for expert in range(3):
            stored = [f"layers.0.experts.{expert}.{linear}.weight_scale" for linear in linears]
            bits = np.concatenate([reader.read(f"{one}.q").view(np.uint8) for one in stored])
            np.testing.assert_array_equal(scales[expert], bits)
            of_tensors = [float(reader.read(f"{one}_2.q")) for one in stored]
            assert len(set(of_tensors)) == len(linears)
            rows = np.repeat(np.array(of_tensors, np.float32), len(bits) // len(linears))
            np.testing.assert_array_equal(units[expert], rows)
    reader.tensors["layers.0.experts.1.up.weight_scale.q"][3, 0] = np.nan
    with pytest.raises(CheckpointError, match="a group's scale is NaN"):
        module.recipes[inputs["gate_up_scale"]].load(reader)


@pytest.mark.parametrize(
    "kind",
    [
        *(Tiny("nvfp4_weights"), Tiny("mxfp4_weights")),
        *(Tiny("nvfp4_weights", experts=4), Tiny("mxfp4_weights", experts=4)),
    ],
    ids=str,
)
def test_packed_e2m1_weights_are_the_same(kind: Tiny) -> None:
    module, reader = tiny(kind)
    old, _ = run_passes(module, NATIVE_PASSES)
    packed, _ = PACK_WEIGHTS(old)
    np.testing.assert_array_equal(logits(packed, reader), logits(old, reader))


def test_a_scale_of_nan_is_refused() -> None:
    scales = np.array([[1, np.nan]], NUMPY_DTYPES["f8e4m3"])
    with pytest.raises(CheckpointError, match="a group's scale is NaN"):
        E4m3Bits()(scales)


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


def test_pre_scales_go_into_the_quantisation() -> None:
    module, linears = _linears(Tiny("int8_sq", pre_scales=True))
    assert ops(module)["Mul"] == 2 * 2  # the gated activations
    for name, (inputs, _) in linears.items():
        if name != "lm_head":
            assert inputs["x"] == f"{name}.quantized"
    assert all(
        set(given(node)) == {"x", "pre_scale", "out_scale"} for node in nodes(module, "quantize")
    )
    weight_only, _ = _linears(Tiny("int4_awq", pre_scales=True))
    assert ops(weight_only)["Mul"] == 2 * 2
    assert all(set(given(node)) == {"x", "pre_scale"} for node in nodes(weight_only, "quantize"))


# Products of x [T, 8] by a square weight, where a mistaken axis would not show in the shapes.

Part = Callable[[Hand], Value]


def _product(hand: Hand, x: Value, weight: Value) -> Value:
    return hand.node("MatMul", "y.matmul", [x, weight], "T", 8, dtype=x.dtype)


def _dequantized(hand: Hand, scale: Value, weight: Value | None = None, **rest: int) -> Value:
    stored = weight or hand.weight("w", 8, 8, dtype="i8")
    bf16 = {"dtype": "bf16", "output_dtype": onnx_type("bf16")}
    values = hand.node("DequantizeLinear", "dq", [stored, scale], 8, 8, **bf16, **rest)
    return hand.transposed(values)


WEIGHTS: dict[str, Part] = {
    "computed": lambda h: h.transposed(h.input("w", 8, 8, dtype="bf16")),
    "not transposed": lambda h: h.weight("w", 8, 8, dtype="bf16"),
    "transposed to itself": lambda h: h.node(
        "Transpose", "t", [h.weight("w", 8, 8, dtype="bf16")], 8, 8, dtype="bf16", perm=(0, 1)
    ),
    "f32": lambda h: h.node(
        "Cast", "narrow", [h.transposed(h.weight("w", 8, 8))], 8, 8, dtype="bf16", to=16
    ),
    "vector": lambda h: h.node("Transpose", "t", [h.weight("w", 8, dtype="bf16")], 8, dtype="bf16"),
    "computed codes": lambda h: _dequantized(
        h, h.constant("s", 0.5), h.input("codes", 8, 8, dtype="i8")
    ),
    "computed scale": lambda h: _dequantized(h, h.input("s")),
    "scale by column": lambda h: _dequantized(h, h.constant("s", [0.5] * 8), axis=1),
    "groups of rows": lambda h: _dequantized(
        h, h.constant("s", np.full((2, 8), 0.5)), axis=0, block_size=4
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_no_kernel_reads_are_left_alone(case: str) -> None:
    hand = Hand()
    x = hand.input("x", "T", 8, dtype="bf16")
    assert_unchanged(LOWER_LINEARS, hand.module(_product(hand, x, WEIGHTS[case](hand))))


@pytest.mark.parametrize("case", ["f32 by i8", "cube"])
def test_activations_that_no_kernel_multiplies_are_left_alone(case: str) -> None:
    hand = Hand()
    if case == "cube":
        cube, weight = hand.input("x", 2, "T", 8), hand.transposed(hand.weight("w", 8, 8))
        out = hand.node("MatMul", "y.matmul", [cube, weight], 2, "T", 8)
    else:
        stored, scale = hand.weight("w", 8, 8, dtype="i8"), hand.constant("s", 0.5)
        values = hand.node("DequantizeLinear", "dq", [stored, scale], 8, 8)
        out = _product(hand, hand.input("x", "T", 8), hand.transposed(values))
    assert_unchanged(LOWER_LINEARS, hand.module(out))


def _quantized(
    hand: Hand, x: Value, scale: Value, again: Value, *zero: Value, **axis: int
) -> Value:
    to_i8 = {} if zero else {"output_dtype": onnx_type("i8")}
    codes = hand.node(
        "QuantizeLinear", "xq", [x, scale, *zero], "T", 8, dtype="i8", **to_i8, **axis
    )
    return hand.node("DequantizeLinear", "xdq", [codes, again, *zero], "T", 8, **axis)


INPUTS: dict[str, tuple[Callable[[Hand, Value], Value], set[str]]] = {
    "zero point": (
        lambda h, x: _quantized(h, x, *[h.constant("a", 0.1)] * 2, h.constant("z", 3, "i8")),
        {"QuantizeLinear", "DequantizeLinear"},
    ),
    "scale by column": (
        lambda h, x: _quantized(h, x, *[h.constant("a", [0.1] * 8)] * 2, axis=1),
        {"QuantizeLinear", "DequantizeLinear"},
    ),
    "two scales": (
        lambda h, x: _quantized(h, x, h.constant("a", 0.1), h.constant("b", 0.2)),
        {"QuantizeLinear", "DequantizeLinear"},
    ),
    "computed scale": (
        lambda h, x: _quantized(h, x, *[h.input("a")] * 2),
        {"QuantizeLinear", "DequantizeLinear"},
    ),
    "dequantised codes": (
        lambda h, _: h.node(
            "DequantizeLinear",
            "xdq",
            [h.input("codes", "T", 8, dtype="i8"), h.constant("a", 0.1)],
            "T",
            8,
        ),
        {"DequantizeLinear"},
    ),
    "product of activations": (lambda h, x: h.node("Mul", "m", [x, x], "T", 8), {"Mul"}),
    "scalar factor": (lambda h, x: h.node("Mul", "m", [x, h.constant("a", 2.0)], "T", 8), {"Mul"}),
    "computed factors": (lambda h, x: h.node("Mul", "m", [x, h.input("a", 8)], "T", 8), {"Mul"}),
    "constant": (
        lambda h, _: h.node("Mul", "m", [h.weight("a", 3, 8), h.weight("b", 8)], 3, 8),
        {"Mul"},
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_no_quantize_makes_are_computed_outside(case: str) -> None:
    make, kept = INPUTS[case]
    hand = Hand()
    x = make(hand, hand.input("x", "T", 8))
    module = hand.module(_product(hand, x, hand.transposed(hand.weight("w", 8, 8))))
    lowered, changed = LOWER_LINEARS(module)
    assert changed and set(ops(lowered)) == {"trtc.linear", *kept}
    assert given(nodes(lowered, "linear")[0])["x"] == x.name


def test_f32_activations_may_be_quantised_where_the_scale_is_zero_free() -> None:
    hand = Hand()
    scale, zero = hand.constant("a", 0.1), hand.constant("z", 0, "i8")
    x = _quantized(hand, hand.input("x", "T", 8), scale, scale, zero)
    stored = hand.node("DequantizeLinear", "dq", [hand.weight("w", 8, 8, dtype="i8"), scale], 8, 8)
    lowered, changed = LOWER_LINEARS(hand.module(_product(hand, x, hand.transposed(stored))))
    assert changed and ops(lowered) == {"trtc.quantize": 1, "trtc.linear": 1}


NARROWING: dict[str, Callable[[Hand], tuple[Value, Recipe]]] = {
    "not rounded": lambda h: (h.input("x", "T", 8, dtype="bf16"), Load("w")),
    "rounded to f16": lambda h: (h.input("x", "T", 8, dtype="bf16"), Cast(Load("w"), "f16")),
    "f16 activation": lambda h: (h.input("x", "T", 8, dtype="f16"), Cast(Load("w"), "bf16")),
}


@pytest.mark.parametrize("case", [*NARROWING, "scaled", "transformed"])
def test_what_bf16_cannot_hold_is_not_narrowed(case: str) -> None:
    hand = Hand()
    if case in NARROWING:
        narrow, recipe = NARROWING[case](hand)
    else:
        narrow, recipe = hand.input("x", "T", 8, dtype="bf16"), Cast(Load("w"), "bf16")
    recipe = Cast(recipe, "f32")
    if case == "transformed":
        recipe = Reshape(recipe, (8, 8))
    x = hand.node("Cast", "wide", [narrow], "T", 8, to=onnx_type("f32"))
    if case == "scaled":
        x = hand.node("Mul", "scaled", [x, hand.weight("p", 8)], "T", 8)
    weight = hand.weight("w", 8, 8, recipe=recipe)
    lowered, changed = LOWER_LINEARS(hand.module(_product(hand, x, hand.transposed(weight))))
    assert changed and ops(lowered)["Cast"] == 1
    assert given(nodes(lowered, "linear")[0])["weight"] == "w"
    assert ops(lowered)["trtc.quantize"] == (case == "scaled")


_CAP = {"Div", "Tanh", "Mul"}
EPILOGUES: dict[str, tuple[Callable[[Hand, Value], Value], set[str]]] = {
    "scalar": (lambda h, y: h.node("Add", "a", [y, h.constant("b", 1.0)], "T", 8), {"Add"}),
    "computed": (lambda h, y: h.node("Add", "a", [y, h.input("b", 8)], "T", 8), {"Add"}),
    "two caps": (lambda h, y: _capped(h, y, h.constant("c", 2.0), h.constant("d", 3.0)), _CAP),
    "computed cap": (lambda h, y: _capped(h, y, *[h.input("c")] * 2), _CAP),
    "vector cap": (lambda h, y: _capped(h, y, *[h.constant("c", [2.0] * 8)] * 2), _CAP),
    "no tanh": (
        lambda h, y: h.node("Div", "d", [y, h.constant("c", 2.0)], "T", 8),
        {"Div"},
    ),
    "no factor": (
        lambda h, y: h.node(
            "Tanh", "t", [h.node("Div", "d", [y, h.constant("c", 2.0)], "T", 8)], "T", 8
        ),
        {"Div", "Tanh"},
    ),
}


def _capped(hand: Hand, y: Value, divisor: Value, factor: Value) -> Value:
    divided = hand.node("Div", "d", [y, divisor], "T", 8)
    return hand.node("Mul", "m", [hand.node("Tanh", "t", [divided], "T", 8), factor], "T", 8)


@pytest.mark.parametrize("case", EPILOGUES)
def test_what_no_epilogue_computes_stays_outside(case: str) -> None:
    make, kept = EPILOGUES[case]
    hand = Hand()
    x = hand.input("x", "T", 8)
    module = hand.module(make(hand, _product(hand, x, hand.transposed(hand.weight("w", 8, 8)))))
    lowered, changed = LOWER_LINEARS(module)
    assert changed and set(ops(lowered)) == {"trtc.linear", *kept}


def test_a_capped_product_in_f32_needs_no_cast() -> None:
    hand = Hand()
    cap = hand.constant("c", 2.0)
    y = _product(hand, hand.input("x", "T", 8), hand.transposed(hand.weight("w", 8, 8)))
    lowered, _ = LOWER_LINEARS(hand.module(_capped(hand, y, cap, cap)))
    assert ops(lowered) == {"trtc.linear": 1}


def test_a_product_that_others_read_keeps_its_own_output() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    product = _product(hand, x, hand.transposed(hand.weight("w", 8, 8)))
    shifted = hand.node("Add", "y.shift", [product, hand.weight("b", 8)], "T", 8)
    module = hand.module(shifted, product)
    lowered, changed = LOWER_LINEARS(module)
    assert changed and ops(lowered) == {"trtc.linear": 1, "Add": 1}
    values = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for expected, found in zip(
        hand.run(module, x=values), hand.run(lowered, x=values), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
