"""builder/passes/rewriter.py."""

import numpy as np
import onnx
import pytest

from tests.builder.passes.tiny import Hand, Tiny, nodes, ops, tiny
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.passes.matching import (
    dtype_of,
    input_of,
    is_weight,
    producer,
)
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.recipes import Cast, Load
from trtc.builder.transforms import ScalePerRow
from trtc.protos.errors import InvariantError


def _chain() -> tuple[Hand, Module]:
    """x -> add a -> add b -> out; add c reads a as well and is an output."""
    hand = Hand()
    x = hand.input("x", "T", 8)
    a = hand.node("add", "a", [x, x], "T", 8)
    b = hand.node("add", "b", [a, x], "T", 8)
    c = hand.node("add", "c", [a, a], "T", 8)
    return hand, hand.module(b, c)


@pytest.mark.parametrize(
    "kind", [Tiny("fp8", kv_dtype="f8e4m3"), Tiny("int4_awq", zero_points=True)], ids=str
)
def test_untouched_modules_make_the_trip_whole(kind: Tiny) -> None:
    """BF16, E4M3 and 4-bit types, domains, versions, external data and inline scalars."""
    module, _ = tiny(kind)
    result = Rewriter(module).module()
    old, new = module.model, result.model
    assert (new.ir_version, new.producer_name) == (old.ir_version, old.producer_name)
    assert list(new.opset_import) == list(old.opset_import)
    for part in ("node", "initializer", "value_info", "input"):
        mine = {item.name: item for item in getattr(old.graph, part)}
        others = {item.name: item for item in getattr(new.graph, part)}
        assert list(mine) == list(others) if part == "input" else set(mine) == set(others)
        for name, item in mine.items():
            if part == "node":
                assert dict(_attributes(item)) == dict(_attributes(others[name]))
                assert list(item.input) == list(others[name].input)
            else:
                assert item == others[name]
    assert result.recipes == dict(module.recipes)
    assert (result.kv, result.limits) == (module.kv, module.limits)


def _attributes(node: onnx.NodeProto) -> list[tuple[str, object]]:
    return [(a.name, onnx.helper.get_attribute_value(a)) for a in node.attribute]


def test_opset_imports_and_metadata_of_the_given_model_stay() -> None:
    _, module = _chain()
    del module.model.opset_import[1:]
    module.model.metadata_props.add(key="source", value="test")
    rewriter = Rewriter(module)
    rewritten = rewriter.module()
    assert [item.domain for item in module.model.opset_import] == [""]
    assert {item.domain for item in rewritten.model.opset_import} == {"", TRTC_DOMAIN}
    assert rewritten.model.metadata_props[0].value == "test"


def test_consumers_and_producers() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    a, b, c = rewriter.fused_nodes("add")
    assert rewriter.sole_consumer(a.outputs[0]) is None
    assert rewriter.sole_consumer(b.outputs[0]) is None
    assert producer(b.inputs[0]) is a and producer(a.inputs[0]) is None
    assert producer(b.inputs[0], "Add") is None
    assert rewriter.is_output(c.outputs[0])
    assert input_of(b, "y") is b.inputs[1]


def test_replaced_nodes_go_with_what_only_they_read() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    a, b, c = rewriter.fused_nodes("add")
    x = a.inputs[0]
    rewriter.fused("add", "new_b", {"x": x, "y": x}, {"out": b.outputs[0]}, {})
    assert [node.name for node in rewriter.fused_nodes("add")] == ["a", "c", "new_b"]
    rewriter.fused("add", "new_c", {"x": x, "y": x}, {"out": c.outputs[0]}, {})
    assert [node.name for node in rewriter.fused_nodes("add")] == ["new_b", "new_c"]
    assert [node.name for node in nodes(rewriter.module(), "add")] == ["new_b", "new_c"]


def test_removed_nodes_are_not_visited() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    visited = []
    for node in rewriter.fused_nodes("add"):
        visited.append(node.name)
        if node.name == "a":
            others = [n for n in rewriter.graph.nodes if n.name in ("b", "c")]
            for other in others:
                x = node.inputs[0]
                rewriter.fused(
                    "add", f"{other.name}2", {"x": x, "y": x}, {"out": other.outputs[0]}, {}
                )
    assert visited == ["a"]


def test_order_follows_the_edges_alone() -> None:
    _, module = _chain()
    expected = Rewriter(module).module().model.SerializeToString(deterministic=True)
    rewriter = Rewriter(module)
    rewriter.graph.nodes.reverse()
    assert rewriter.module().model.SerializeToString(deterministic=True) == expected


def test_a_cycle_is_found() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    a, b, _ = rewriter.fused_nodes("add")
    a.inputs[0] = b.outputs[0]
    with pytest.raises(AssertionError, match="depends on itself"):
        rewriter.module()


def test_illegal_nodes_are_refused_when_they_are_made() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    x = rewriter.graph.inputs[0]
    out = rewriter.variable("out", "f32", ("T", 8))
    with pytest.raises(InvariantError, match=r"bad: quantize\.out_dtype must be given"):
        rewriter.fused("quantize", "bad", {"x": x}, {"out": out}, {})
    with pytest.raises(AssertionError, match="no inputs"):
        rewriter.fused("quantize", "bad", {"y": x}, {"out": out}, {"out_dtype": "f32"})


def test_weights_are_shared_by_recipe_and_never_overwrite_one_another() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    first = rewriter.weight("w", Load("w"), "bf16", (8, 8))
    assert rewriter.weight("w", Load("w"), "bf16", (8, 8)) is first
    other = rewriter.weight("w", Load("v"), "bf16", (8, 8))
    assert other.name == "w.2" and dtype_of(other) == "bf16" and is_weight(other)
    assert rewriter.value(first) is None
    assert rewriter.as_type(first, "bf16") is first
    wide = rewriter.as_type(first, "f32")
    assert rewriter.recipes[wide.name] == Cast(Load("w"), "f32")
    assert rewriter.as_type(first, "f32") is wide


def test_small_weights_stay_comparable() -> None:
    _, module = _chain()
    rewriter = Rewriter(module)
    scale = rewriter.constant("s", np.array(0.5, np.float32), "f32")
    twin = rewriter.weight("t", Load("t"), "f32", (), np.array(0.5, np.float32))
    assert rewriter.scalar(scale) == 0.5 and rewriter.same_weight(scale, twin)
    narrow = rewriter.as_type(scale, "bf16")
    assert rewriter.scalar(narrow) == 0.5 and not rewriter.same_weight(scale, narrow)
    rows = rewriter.derived("r", ScalePerRow(4), (scale,), "f32", (4, 1))
    np.testing.assert_array_equal(rewriter.value(rows), np.full((4, 1), 0.5, np.float32))
    large = rewriter.derived("l", ScalePerRow(64), (scale,), "f32", (64, 1))
    assert rewriter.value(large) is None
    assert rewriter.same_weight(None, None) and not rewriter.same_weight(None, scale)


def test_inputs_beyond_the_written_ones_can_be_set() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    module = hand.module(hand.node("quantize", "q", [x], "T", 8, out_dtype="f32"))
    rewriter = Rewriter(module)
    (node,) = rewriter.fused_nodes("quantize")
    assert input_of(node, "out_scale") is None
    scale = rewriter.constant("s", np.array(0.5, np.float32), "f32")
    rewriter.set_input(node, "out_scale", scale)
    rewritten = rewriter.module()
    assert list(nodes(rewritten, "quantize")[0].input) == ["x", "", "s"]
    assert ops(rewritten) == {"trtc.quantize": 1}
