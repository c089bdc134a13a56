"""builder/passes/fuse_quantize.py."""

from typing import Literal

import pytest

from tests.builder.passes.tiny import (
    Hand,
    Loose,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    before,
    given,
    nodes,
    ops,
)
from trtc.builder.graph_writer import Value
from trtc.builder.passes.fuse_quantize import FUSE_QUANTIZE

DELTA_ROWS = {"qkv": 2 * 16 + 2 * 8, "z": 2 * 8, "b": 2, "a": 2}
DELTA_STEPS: dict[str, tuple[int | str, ...]] = {
    "query_start": ("B+1",),
    "context_lens": ("B",),
    "page_table": ("B", "P"),
    "slots": ("T",),
}


@pytest.mark.parametrize(
    ("kind", "out_dtype"),
    [
        (Tiny("fp8"), "f8e4m3"),
        (Tiny("fp8", gemma=True, dtype="f32"), "f8e4m3"),
        (Tiny("int8_sq"), "i8"),
        (Tiny("w4a8_awq"), "f8e4m3"),
    ],
    ids=str,
)
def test_norms_attention_and_swiglu_quantise_their_output(kind: Tiny, out_dtype: str) -> None:
    """The same roundings in the same order: no bit changes, in bf16 as well."""
    old, new = assert_preserves(FUSE_QUANTIZE, kind, tolerance=0.0)
    assert ops(old)["trtc.quantize"] == 8
    # Behind the last attention the logit rows are chosen first.
    assert [node.name for node in nodes(new, "quantize")] == ["layers.1.attention.o.quantize"]
    for node in (*nodes(new, "paged_attention")[:1], *nodes(new, "swiglu")):
        assert attributes(node)["out_dtype"] == out_dtype
        assert "out_scale" in given(node)
    norms = {node.name: node for node in nodes(new, "rms_norm")}
    assert attributes(norms["layers.0.attention_norm"])["out_dtype"] == out_dtype
    assert "out_scale" not in given(norms["final_norm"])


def test_pre_scales_alone_are_fused_where_one_reader_is_left() -> None:
    kind = Tiny("int4_awq", pre_scales=True)
    old, new = assert_preserves(FUSE_QUANTIZE, kind, tolerance=0.0)
    assert all(set(given(node)) == {"x", "pre_scale"} for node in nodes(old, "quantize"))
    assert "pre_scale" in given(nodes(new, "paged_attention")[0])
    assert all("pre_scale" in given(node) for node in nodes(new, "swiglu"))
    # q, k and v, gate and up read their norm through different scales, of which it applies one.
    assert ops(new)["trtc.quantize"] == 2 * 3 + 1


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("scheme", "out_dtype"), [("fp8", "f8e4m3"), ("int8_sq", "i8")])
def test_a_norm_that_others_read_gives_its_result_as_it_is_too(
    scheme: str, out_dtype: str, dtype: Literal["f32", "bf16"]
) -> None:
    """Routers, and experts that quantise rows themselves."""
    kind = Tiny(scheme, experts=4, shared="gated", dtype=dtype)
    old, new = assert_preserves(FUSE_QUANTIZE, kind, tolerance=0.0)
    # For q, k and v, o, the shared expert's gate and up, and its down.
    assert ops(old)["trtc.quantize"] == 2 * 4
    assert [node.name for node in nodes(new, "quantize")] == ["layers.1.attention.o.quantize"]
    norms = {node.name: node for node in nodes(new, "rms_norm")}
    for layer in range(2):
        norm = norms[f"layers.{layer}.mlp_norm"]
        out, total, row_scale, normed = norm.output
        assert attributes(norm)["out_dtype"] == out_dtype
        assert total == row_scale == ""
        assert {given(node)["x"] for node in nodes(new, "moe")} >= {normed}
        readers = {node.name for node in new.model.graph.node if out in node.input}
        assert readers == {f"layers.{layer}.mlp.shared.gate_up"}
        # q, k and v alone read the other.
        assert len(norms[f"layers.{layer}.attention_norm"].output) == 1


@pytest.mark.parametrize("out_dtype", ["f8e4m3", "i8"])
def test_delta_nets_quantise_their_output(out_dtype: str) -> None:
    hand = Hand()
    rows = [hand.input(name, "T", width) for name, width in DELTA_ROWS.items()]
    state = hand.input("state", "pages", 2, 16 * 8)
    steps = [hand.input(name, *axes, dtype="i32") for name, axes in DELTA_STEPS.items()]
    weights = [hand.weight("rate", 2), hand.weight("dt_bias", 2), hand.weight("norm", 8)]
    made, left = hand.writer.node_of_two(
        "gated_delta", "n", [*rows, state, *steps, *weights],
        (Value("made", "f32", ("T", 16)), Value("left", "f32", state.shape)),
        domain="trtc", key_heads=1, key_dim=16, value_heads=2, value_dim=8, gate="silu", eps=1e-5,
        page_size=4, out_dtype="f32",
    )  # fmt: skip
    scales = [hand.weight("pre", 16), hand.constant("scale", 0.5)]
    out = hand.node("quantize", "q", [made, *scales], "T", 16, dtype=out_dtype, out_dtype=out_dtype)
    new, changed = Loose(FUSE_QUANTIZE)(hand.module(out, left))
    assert changed and ops(new) == {"trtc.gated_delta": 1}
    (node,) = nodes(new, "gated_delta")
    assert attributes(node)["out_dtype"] == out_dtype
    assert (given(node)["pre_scale"], given(node)["out_scale"]) == ("pre", "scale")
    assert list(node.output) == [out.name, left.name]


@pytest.mark.parametrize("kind", [Tiny(), Tiny("int4_awq")], ids=str)
def test_unquantised_activations_are_left_alone(kind: Tiny) -> None:
    module, _ = before(FUSE_QUANTIZE, kind)
    assert_unchanged(FUSE_QUANTIZE, module)


@pytest.mark.parametrize("case", ["read elsewhere", "quantised", "other producer"])
def test_other_quantisations_are_left_alone(case: str) -> None:
    hand = Hand()
    x, scale = hand.input("x", "T", 8), hand.constant("scale", 0.5)
    weight = hand.weight("w", 8)
    pre_scale = hand.weight("p", 8) if case == "quantised" else None
    if case == "other producer":
        made = hand.node("add", "n", [x, x], "T", 8)
    elif case == "read elsewhere":
        made = hand.node("swiglu", "n", [x, x], "T", 8, activation="silu", out_dtype="f32")
    else:
        made = hand.node(
            "rms_norm", "n", [x, None, weight, None, pre_scale], "T", 8, eps=1e-5, out_dtype="f32"
        )
    out = hand.node("quantize", "q", [made, None, scale], "T", 8, dtype="i8", out_dtype="i8")
    outs = [out, made] if case == "read elsewhere" else [out]
    assert_unchanged(FUSE_QUANTIZE, hand.module(*outs))


def test_the_sum_of_a_norm_is_not_its_output() -> None:
    hand = Hand()
    x, scale = hand.input("x", "T", 8), hand.constant("scale", 0.5)
    total = hand.node(
        "rms_norm", "n", [x, x, hand.weight("w", 8)], "T", 8, eps=1e-5, out_dtype="f32"
    )
    module = hand.module(
        total,
        hand.node("quantize", "q", [total, None, scale], "T", 8, dtype="i8", out_dtype="i8"),
    )
    # Let quantize read the second output, and the graph give the first.
    norm, quantize = module.model.graph.node
    norm.output.append("total")
    quantize.input[0] = "total"
    assert_unchanged(FUSE_QUANTIZE, module)
