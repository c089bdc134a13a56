"""builder/passes/invariants.py: every rule, broken once."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest

from tests.builder.passes.tiny import Hand, Tiny, before, nodes, tiny
from trtc.builder.module import Module
from trtc.builder.passes.invariants import check_module
from trtc.builder.passes.verify_native import VERIFY_NATIVE
from trtc.builder.recipes import Load
from trtc.protos.errors import InvariantError


@pytest.fixture
def native() -> Module:
    module, _ = before(VERIFY_NATIVE, Tiny("fp8"))
    return module


@pytest.mark.parametrize("kind", [Tiny(), Tiny("int4_awq"), Tiny("fp8", experts=4)], ids=str)
def test_source_and_native_graphs_are_sound(kind: Tiny) -> None:
    check_module(tiny(kind)[0])
    check_module(before(VERIFY_NATIVE, kind)[0])


def _rename_node(graph: onnx.GraphProto) -> None:
    graph.node[1].name = graph.node[0].name


def _unknown_operator(graph: onnx.GraphProto) -> None:
    graph.node[0].op_type = "embeding"


def _unknown_attribute(graph: onnx.GraphProto) -> None:
    graph.node[0].attribute.append(onnx.helper.make_attribute("colour", 1))


def _bad_enum(graph: onnx.GraphProto) -> None:
    _attribute(graph, "linear", "weight_dtype").s = b"f64"


def _missing_attribute(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "paged_attention")
    del node.attribute[:]


def _wrong_shape(graph: onnx.GraphProto) -> None:
    _attribute(graph, "linear", "N").i = 5


def _missing_input(graph: onnx.GraphProto) -> None:
    next(n for n in graph.node if n.op_type == "linear").input[1] = ""


def _too_many_inputs(graph: onnx.GraphProto) -> None:
    graph.node[0].input.extend(["token_ids"] * 3)


def _wrong_type(graph: onnx.GraphProto) -> None:
    next(n for n in graph.node if n.op_type == "gather_rows").input[1] = "final_norm.weight.f32"


def _wrong_stated_type(graph: onnx.GraphProto) -> None:
    _info(graph).elem_type = onnx.TensorProto.FLOAT


def _wrong_stated_shape(graph: onnx.GraphProto) -> None:
    _info(graph).shape.dim[1].dim_value += 1


def _wrong_stated_rank(graph: onnx.GraphProto) -> None:
    _info(graph).shape.dim.add(dim_value=1)


def _too_many_outputs(graph: onnx.GraphProto) -> None:
    graph.node[0].output.append("second")


def _info(graph: onnx.GraphProto) -> onnx.TypeProto.Tensor:
    name = graph.node[0].output[0]
    return next(v for v in graph.value_info if v.name == name).type.tensor_type


def _made_twice(graph: onnx.GraphProto) -> None:
    graph.node[1].output[0] = graph.node[0].output[0]


def _no_output(graph: onnx.GraphProto) -> None:
    graph.output[0].name = "probabilities"


def _large_inline(graph: onnx.GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "final_norm.weight.f32")
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones(32, np.float32), tensor.name))


def _bad_onnx(graph: onnx.GraphProto) -> None:
    split = next(n for n in graph.node if n.op_type == "Split")
    split.attribute.append(onnx.helper.make_attribute("direction", 1))


def _attribute(graph: onnx.GraphProto, op: str, name: str) -> onnx.AttributeProto:
    node = next(n for n in graph.node if n.op_type == op)
    return next(a for a in node.attribute if a.name == name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_rename_node, "embedding: two nodes have this name"),
        (_unknown_operator, "no operator embeding"),
        (_unknown_attribute, "no attribute colour"),
        (_bad_enum, "weight_dtype is 'f64'"),
        (_missing_attribute, "must be given"),
        (_wrong_shape, "linear"),
        (_missing_input, "weight is missing"),
        (_too_many_inputs, "more inputs"),
        (_wrong_type, "rows"),
        (_wrong_stated_type, "stated as"),
        (_wrong_stated_shape, "stated as"),
        (_wrong_stated_rank, "stated as"),
        (_too_many_outputs, "more inputs or outputs"),
        (_made_twice, "a second time"),
        (_no_output, "probabilities: nothing makes this graph output"),
        (_large_inline, "32 elements are inline"),
        (_bad_onnx, "onnx.checker refuses"),
    ],
)
def test_each_rule_is_checked(
    native: Module, damage: Callable[[onnx.GraphProto], None], message: str
) -> None:
    damage(native.model.graph)
    with pytest.raises(InvariantError, match=message):
        check_module(native)


def test_recipes_and_initialisers_match(native: Module) -> None:
    extra = replace(native, recipes={**native.recipes, "ghost": Load("ghost")})
    with pytest.raises(InvariantError, match="ghost: weight has a recipe but is not in the graph"):
        check_module(extra)
    fewer = {name: recipe for name, recipe in native.recipes.items() if name != "lm_head.weight"}
    with pytest.raises(InvariantError, match=r"lm_head\.weight: weight has no recipe"):
        check_module(replace(native, recipes=fewer))


def test_extents_that_vary_may_be_named_differently(native: Module) -> None:
    _info(native.model.graph).shape.dim[0].dim_param = "tokens"
    check_module(native)
    _info(native.model.graph).shape.dim[0].dim_value = 7
    check_module(native)


def test_nodes_whose_types_are_not_stated_are_checked_by_their_attributes() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    first = hand.node("add", "a", [x, x], "T", 8)
    module = hand.module(hand.node("quantize", "q", [first], "T", 8, out_dtype="f32"))
    del module.model.graph.value_info[:]
    check_module(module)
    nodes(module, "quantize")[0].attribute[0].s = b"f64"
    with pytest.raises(InvariantError, match="out_dtype is 'f64'"):
        check_module(module)
