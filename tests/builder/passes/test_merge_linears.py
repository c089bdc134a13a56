"""builder/passes/merge_linears.py."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from tests.builder.passes.tiny import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    WIDTH,
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    before,
    given,
    nodes,
    ops,
    shape_of,
)
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.merge_linears import MERGE_LINEARS, merge_linears_of

KV_SIZE = KV_HEADS * HEAD_DIM


@pytest.mark.parametrize(
    "kind",
    [
        Tiny(),
        Tiny(bias=True, fused=True, head_norm=True),
        Tiny("fp8", per_tensor=True, dtype="f32"),
        Tiny("int8_sq", dtype="f32"),
        Tiny("int4_awq", zero_points=True),
        Tiny("w4a8_awq", dtype="f32"),
        Tiny(experts=4),
    ],
    ids=str,
)
def test_q_k_v_and_gate_up_become_one(kind: Tiny) -> None:
    old, new = assert_preserves(MERGE_LINEARS, kind, tolerance=1e-6)
    mlps = 0 if kind.experts else 2
    assert ops(new)["Split"] == 2 + mlps
    assert ops(old)["trtc.linear"] - ops(new)["trtc.linear"] == 2 * 2 + mlps
    merged = {node.name: node for node in nodes(new, "linear")}
    qkv = merged["layers.0.attention.qkv"]
    assert attributes(qkv)["N"] == HIDDEN + 2 * KV_SIZE
    assert shape_of(new, given(qkv)["weight"]) == (HIDDEN + 2 * KV_SIZE, HIDDEN)
    if not kind.experts:
        assert attributes(merged["layers.1.mlp.gate_up"])["N"] == 2 * WIDTH


def test_scales_and_biases_are_joined_in_the_order_of_the_views() -> None:
    kind = Tiny("fp8", per_tensor=True, bias=True)
    old, reader = before(MERGE_LINEARS, kind)
    new, _ = MERGE_LINEARS(old)
    separate = {node.name: given(node) for node in nodes(old, "linear")}
    qkv = given({n.name: n for n in nodes(new, "linear")}["layers.1.attention.qkv"])
    assert set(qkv) == {"x", "weight", "weight_scale", "input_scale", "bias"}
    for name in ("weight", "weight_scale", "bias"):
        parts = [
            old.recipes[separate[f"layers.1.attention.{part}"][name]].load(reader) for part in "qkv"
        ]
        found = new.recipes[qkv[name]].load(reader)
        np.testing.assert_array_equal(
            found.astype(np.float32), np.concatenate(parts).astype(np.float32)
        )
        assert shape_of(new, qkv[name]) == found.shape


@pytest.mark.parametrize(
    "kind",
    [Tiny("fp8", equal_input_scales=False), Tiny("int4_awq", pre_scales=True)],
    ids=str,
)
def test_inputs_quantised_differently_are_kept_apart(kind: Tiny) -> None:
    module, _ = before(MERGE_LINEARS, kind)
    assert_unchanged(MERGE_LINEARS, module)


def _linear(hand: Hand, name: str, x: Value, **rest: Any) -> Value:
    columns = rest.get("N", 4)
    weight = hand.weight(f"{name}.weight", columns, 8)
    inputs = [x, weight, *(rest.pop(key, None) for key in ("s", "z", "i", "b", "r"))]
    settings = {"N": columns, "weight_dtype": "f32", "out_dtype": "f32"} | rest
    return hand.node("linear", name, inputs, "T", columns, **settings)


@pytest.mark.parametrize("case", ["bias", "input", "softcap", "residual", "scale", "output"])
def test_linears_that_differ_are_kept_apart(case: str) -> None:
    hand = Hand()
    x, y = hand.input("x", "T", 8), hand.input("y", "T", 8)
    r = hand.input("r", "T", 4)
    choices: dict[str, dict[str, Any]] = {
        "bias": {"b": hand.weight("b", 4)},
        "softcap": {"softcap": 2.0},
        "residual": {"r": r},
        "scale": {"i": hand.constant("i", 0.5)},
    }
    other = choices.get(case, {})
    first = _linear(hand, "m.a", x)
    second = _linear(hand, "m.b", y if case == "input" else x, **other)
    outs = (
        [first, second] if case == "output" else [hand.node("add", "m.c", [first, second], "T", 4)]
    )
    assert_unchanged(MERGE_LINEARS, hand.module(*outs))


def test_the_equal_ones_among_several_are_merged() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    scales = [hand.constant(f"s{i}", value) for i, value in enumerate((0.5, 0.25, 0.5))]
    a, b, c = (_linear(hand, f"m.{n}", x, i=s) for n, s in zip("abc", scales, strict=True))
    module = hand.module(
        hand.node("add", "m.sum", [hand.node("add", "m.ab", [a, b], "T", 4), c], "T", 4)
    )
    merged, changed = MERGE_LINEARS(module)
    assert changed
    assert {node.name for node in nodes(merged, "linear")} == {"m.ac", "m.b"}
    values = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    np.testing.assert_allclose(hand.run(merged, x=values), hand.run(module, x=values), rtol=1e-6)


@pytest.mark.parametrize(("experts", "linears"), [(4, 1), (6, 2)])
def test_a_router_is_merged_with_a_gate_where_that_begins_at_16_bytes(
    experts: int, linears: int
) -> None:
    """And never with the shared expert's linears, though all have one input in f32."""
    old, _ = before(MERGE_LINEARS, Tiny(experts=experts, shared="gated"))
    new, _ = MERGE_LINEARS(old)
    found = [
        node.name
        for node in nodes(new, "linear")
        if "layers.0.mlp.router" in node.name or "layers.0.mlp.shared_gate" in node.name
    ]
    assert len(found) == linears
    if linears == 1:
        (router,) = (node for node in nodes(new, "linear") if node.name == found[0])
        assert attributes(router)["N"] == 16, "4 experts, the gate, and zeros"
    assert "layers.0.mlp.shared.gate_up" in {node.name for node in nodes(new, "linear")}


@pytest.mark.parametrize(
    ("widths", "ranks", "found"),
    [
        ((16, 2, 8), 1, [[16, 8, 2]]),
        ((16, 2, 2, 8), 1, [[2], [16, 8, 2]]),
        ((16, 4, 4), 1, [[16, 4, 4]]),
        # A rank has 2 of 4, which are 8 bytes (the gates of a delta net with few heads).
        ((16, 4, 4), 2, [[4], [16, 4]]),
        ((32, 16), 4, [[32, 16]]),
    ],
)
def test_each_of_the_merged_begins_at_a_word(
    widths: tuple[int, ...], ranks: int, found: list[list[int]]
) -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    outs = [_linear(hand, f"m.{at}", x, N=width) for at, width in enumerate(widths)]
    read = [
        hand.node("add", f"m.read{at}", [out, out], "T", out.shape[1])
        for at, out in enumerate(outs)
    ]
    module = hand.module(*read)
    merged, changed = merge_linears_of(ranks)(module)
    assert changed
    assert sorted(_widths(merged)) == found


def test_columns_that_all_ranks_have_count_whole() -> None:
    """Of two ranks each has 12 columns of z, and 20 of x, B and C, of which B and C are on both:
    neither fills words of 4 values, though half of 32 would."""
    hand = Hand()
    heads, dim, state_size = 2, 12, 4
    x = hand.input("x", "T", 8)
    z = _linear(hand, "m.z", x, N=heads * dim, out_dtype="bf16", dtype="bf16")
    width = heads * dim + 2 * state_size
    xbc = _linear(hand, "m.xbc", x, N=width, out_dtype="bf16", dtype="bf16")
    steps = (
        ("query_start", "B+1"),
        ("context_lens", "B"),
        ("page_table", "B", "P"),
        ("slots", "T"),
    )
    out = hand.node(
        "mamba2",
        "m.mamba2",
        [
            xbc,
            z,
            hand.input("dt", "T", heads, dtype="bf16"),
            hand.input("state", "num_pages", heads, dim * state_size),
            *(hand.input(name, *shape, dtype="i32") for name, *shape in steps),
            *(hand.weight(name, heads) for name in ("rate", "dt_bias", "skip")),
            hand.weight("norm", heads * dim),
        ],
        "T",
        heads * dim,
        dtype="bf16",
        heads=heads,
        head_dim=dim,
        groups=1,
        state_size=state_size,
        eps=1e-5,
        page_size=4,
    )
    module = hand.module(out)
    assert merge_linears_of(1)(module)[1]
    assert not merge_linears_of(2)(module)[1]


def _widths(module: Module) -> Iterator[list[int]]:
    """Of each linear, the widths of what it gives."""
    sizes = {
        node.input[0]: onnx.numpy_helper.to_array(tensor).tolist()
        for node in module.model.graph.node
        if node.op_type == "Split"
        for tensor in module.model.graph.initializer
        if tensor.name == node.input[1]
    }
    for linear in nodes(module, "linear"):
        yield sizes.get(linear.output[0], [attributes(linear)["N"]])
