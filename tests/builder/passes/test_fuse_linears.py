"""builder/passes/fuse_linears.py."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.builder.passes.tiny import (
    Hand,
    Loose,
    Tiny,
    assert_unchanged,
    attributes,
    before,
    given,
    nodes,
    ops,
)
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.fuse_linears import FUSE_LINEARS
from trtc.builder.recipes import Constant
from trtc.plugins.rounding import NUMPY_DTYPES, cast

K, N, GROUP = 256, 96, 128


def hand(
    graph: Hand, *, norm: bool = True, gate: bool = True, case: str = "", dtype: str = "u4"
) -> Module:
    """rms_norm, linear, Split and swiglu as the pass takes them, but for what `case` says."""
    x = graph.input("x", "T", K, dtype="bf16")
    pre_scale = graph.weight("n.pre", K)
    outputs: list[Value] = []
    if norm:
        residual = graph.input("r", "T", K, dtype="bf16") if case == "residual" else None
        centered = int(case == "centered")
        x = graph.node(
            "rms_norm", "n", [x, residual, graph.weight("n.weight", K), None, pre_scale], "T", K,
            dtype="bf16", eps=1e-5, centered=centered, out_dtype="bf16",
        )  # fmt: skip
        if case == "norm read elsewhere":
            outputs.append(x)
    product = linear(graph, x, case, dtype)
    if case == "product read elsewhere":
        outputs.append(product)
    if not gate:
        return graph.module(product, *outputs)
    sizes = graph.constant("sizes", [N // 2, N // 2], "i64")
    halves = (Value("gate", "bf16", ("T", N // 2)), Value("up", "bf16", ("T", N // 2)))
    halves = graph.writer.node_of_two("Split", "split", [product, sizes], halves, domain="", axis=1)
    if case == "halves turned":
        halves = (halves[1], halves[0])
    out_scale = graph.constant("out_scale", 0.5) if case == "gate to E4M3" else None
    out_type = "f8e4m3" if out_scale else "bf16"
    out = graph.node(
        "swiglu", "g", [*halves, graph.weight("g.pre", N // 2), out_scale], "T", N // 2,
        dtype=out_type, activation="gelu_tanh", out_dtype=out_type,
    )  # fmt: skip
    return graph.module(out, *outputs)


def linear(graph: Hand, x: Value, case: str, dtype: str) -> Value:
    rng = np.random.default_rng(3)
    is_iq4, stored = dtype == "iq4", "u4" if dtype == "iq4" else dtype
    low, high = (0, 16) if stored == "u4" else (-8, 8)

    def weight(name: str, values: Any, kind: str) -> Value:
        return graph.weight(name, *values.shape, dtype=kind, recipe=Constant(values))

    codes = rng.integers(low, high, (N, K)).astype(NUMPY_DTYPES[stored])
    scales = rng.uniform(0.005, 0.02, (N, K // GROUP)).astype(np.float32)
    has_bytes = dtype in ("iq4", "f4e2m1")
    if has_bytes:
        scales = rng.integers(*((0, 256) if is_iq4 else (120, 123)), scales.shape, np.uint8)
    unit = np.float32(2) ** -rng.integers(10, 13, N).astype(np.float32)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
    residual = graph.input("more", "T", N, dtype="bf16") if case == "sum" else None
    softcap, layout = (
        (2.0 if case == "softcap" else 0.0),
        "row_major" if case == "rows" else "tiles",
    )
    return graph.node(
        "linear", "l",
        [
            x, weight("w", codes, stored), weight("s", scales, "u8" if has_bytes else "f32"),
            weight("z", zeros, "u8") if dtype == "u4" else None,
            None, graph.weight("b", N), residual,
            None, weight("unit", unit, "f32") if is_iq4 else None,
        ],
        "T", N, dtype="bf16",
        N=N, group_size=GROUP, weight_dtype=dtype, layout=layout, activation="exact",
        softcap=softcap, out_dtype="bf16",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["i4", "u4", "iq4", "f4e2m1"])
@pytest.mark.parametrize(("norm", "gate"), [(True, True), (True, False), (False, True)])
def test_a_linear_takes_its_neighbours_in_bit_for_bit(norm: bool, gate: bool, dtype: str) -> None:
    graph = Hand()
    old = hand(graph, norm=norm, gate=gate, dtype=dtype)
    new, changed = run_passes(old, [Loose(FUSE_LINEARS)])
    assert changed and ops(new) == {"trtc.fused_linear": 1}
    (node,) = nodes(new, "fused_linear")
    assert node.name == "l"
    assert attributes(node)["I"] == (N // 2 if gate else N)
    expected = {"x", "weight", "weight_scale", "bias"}
    expected |= {"u4": {"weight_zero"}, "iq4": {"scale_unit"}}.get(dtype, set())
    expected |= {"norm_weight", "norm_pre_scale"} if norm else set()
    expected |= {"gate_pre_scale"} if gate else set()
    assert set(given(node)) == expected
    x = cast(np.random.default_rng(4).standard_normal((5, K)).astype(np.float32), "bf16")
    (wanted,), (found,) = (graph.run(module, x=x) for module in (old, new))
    assert np.isfinite(wanted.astype(np.float32)).all()
    assert found.tobytes() == wanted.tobytes()
    assert_unchanged(FUSE_LINEARS, new)


@pytest.mark.parametrize("case", ["sum", "softcap", "rows"])
def test_linears_with_more_around_them_stay(case: str) -> None:
    assert_unchanged(FUSE_LINEARS, hand(Hand(), case=case, gate=case == "rows"))


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("residual", {"trtc.rms_norm": 1, "trtc.fused_linear": 1}),
        ("centered", {"trtc.rms_norm": 1, "trtc.fused_linear": 1}),
        ("norm read elsewhere", {"trtc.rms_norm": 1, "trtc.fused_linear": 1}),
        ("product read elsewhere", {"trtc.fused_linear": 1, "Split": 1, "trtc.swiglu": 1}),
        ("halves turned", {"trtc.fused_linear": 1, "Split": 1, "trtc.swiglu": 1}),
        ("gate to E4M3", {"trtc.fused_linear": 1, "Split": 1, "trtc.swiglu": 1}),
    ],
)
def test_a_neighbour_that_others_need_stays(case: str, left: dict[str, int]) -> None:
    new, changed = run_passes(hand(Hand(), case=case), [Loose(FUSE_LINEARS)])
    assert changed and ops(new) == left


@pytest.mark.parametrize("reads", ["out", "normed"])
def test_a_norm_of_two_results_stays(reads: str) -> None:
    """Others read the one that the linear does not."""
    module = hand(Hand(), gate=False, case="norm read elsewhere")
    graph = module.model.graph
    norm, product = graph.node
    graph.value_info.append(helper.make_tensor_value_info(reads, TensorProto.BFLOAT16, ["T", K]))
    (others,) = norm.output
    product.input[0] = reads
    results = {"out": others, "normed": others, reads: reads}
    norm.output[:] = [results["out"], "", "", results["normed"]]
    assert_unchanged(FUSE_LINEARS, module)


@pytest.mark.parametrize("kind", [Tiny("bf16"), Tiny("fp8"), Tiny("int4_awq", experts=3)], ids=str)
def test_other_models_stay(kind: Tiny) -> None:
    module, _ = before(FUSE_LINEARS, kind)
    assert_unchanged(FUSE_LINEARS, module)
