"""Writing ONNX nodes with their types and shapes; every value it makes is described."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
from onnx import helper

from trtc.builder.module import OPSET, TENSORRT_DOMAIN, TRTC_DOMAIN
from trtc.builder.recipes import Array, Constant, Recipe, TensorReader
from trtc.builder.weights import Tensor
from trtc.protos.dtypes import DTYPES

INLINE_ELEMENTS = 16
"""Weights up to this size are in the graph as well: see builder/module.py."""
_IR_VERSION = 11
"""The one that opset 23 came with."""
_ONNX_TYPES: dict[str, int] = {name: dtype.onnx for name, dtype in DTYPES.items()} | {
    "i64": onnx.TensorProto.INT64,
    "bool": onnx.TensorProto.BOOL,
}
Dimension = int | str
Attribute = int | float | str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph."""

    name: str
    dtype: str
    """Name in protos/dtypes.py, i64 or bool."""
    shape: tuple[Dimension, ...]


def onnx_type(dtype: str) -> int:
    """The onnx.TensorProto.DataType of a trtc name."""
    return _ONNX_TYPES[dtype]


def may_be_inline(code: int, elements: int) -> bool:
    """Whether an initialiser of an onnx.TensorProto.DataType is in the graph. Sizes and shapes are,
    however many (of a Split into the inputs of 35 layers): ONNX's own operators alone read them,
    and passes and plans do not know a graph without them."""
    return code == onnx.TensorProto.INT64 or elements <= INLINE_ELEMENTS


class GraphWriter:
    """Collects a graph; a node's output is called `<node>.out`."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._inputs: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._recipes: dict[str, Recipe] = {}

    def input(self, name: str, dtype: str, shape: tuple[Dimension, ...]) -> Value:
        value = Value(name, dtype, shape)
        self._inputs.append(_value_info(value))
        return value

    def weight(self, name: str, tensor: Tensor) -> Value:
        """An initialiser; one that exists already is shared."""
        if name not in self._initializers:
            self._recipes[name] = tensor.recipe
            self._initializers[name] = self._initializer(name, tensor)
        return Value(name, tensor.dtype, tensor.shape)

    def constant(self, name: str, values: Array, dtype: str) -> Value:
        return self.weight(name, Tensor(Constant(values), dtype, values.shape))

    def node(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[Value | None],
        dtype: str,
        shape: tuple[Dimension, ...],
        *,
        domain: str = "",
        output: str = "",
        attributes: Mapping[str, Attribute] | None = None,
        **more: Attribute,
    ) -> Value:
        """Append a node with one output, `output` or `<name>.out`; None is an absent input.

        Attributes are given by keyword, or in `attributes` when there is a choice of them.
        """
        value = Value(output or f"{name}.out", dtype, shape)
        self._append(op_type, name, inputs, [value], domain, {**(attributes or {}), **more})
        return value

    def node_of_two(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[Value | None],
        outputs: tuple[Value, Value],
        *,
        domain: str,
        **attributes: Attribute,
    ) -> tuple[Value, Value]:
        """Append a node with two outputs, which the caller names."""
        self._append(op_type, name, inputs, outputs, domain, attributes)
        return outputs

    def split(self, name: str, value: Value, width: int) -> Sequence[Value]:
        """Append a Split of columns into equal parts of `width`."""
        columns = value.shape[1]
        assert isinstance(columns, int)
        parts = [
            Value(f"{name}.{number}", value.dtype, (value.shape[0], width))
            for number in range(columns // width)
        ]
        sizes = self.constant(f"{name}.sizes", np.full(len(parts), width, np.int64), "i64")
        self._append("Split", name, [value, sizes], parts, "", {"axis": 1})
        return parts

    def _append(
        self,
        op_type: str,
        name: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value],
        domain: str,
        attributes: Mapping[str, Attribute],
    ) -> None:
        names = [given.name if given else "" for given in inputs]
        while names and not names[-1]:
            names.pop()
        node = onnx.NodeProto(
            op_type=op_type,
            name=name,
            input=names,
            output=[value.name for value in outputs],
            attribute=[_attribute(key, one) for key, one in sorted(attributes.items())],
        )
        if domain:
            node.domain = domain
        self._nodes.append(node)
        self._values += [_value_info(value) for value in outputs]

    def finish(self, outputs: Sequence[Value]) -> tuple[onnx.ModelProto, Mapping[str, Recipe]]:
        """The model, and the recipes of its initialisers."""
        names = {value.name for value in outputs}
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            self._inputs,
            [_value_info(value) for value in outputs],
            initializer=list(self._initializers.values()),
            value_info=[info for info in self._values if info.name not in names],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(TRTC_DOMAIN, 1)]
        if any(node.domain == TENSORRT_DOMAIN for node in self._nodes):
            opsets.append(helper.make_opsetid(TENSORRT_DOMAIN, 1))
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="trtc"
        )
        return model, self._recipes

    def _initializer(self, name: str, tensor: Tensor) -> onnx.TensorProto:
        code = onnx_type(tensor.dtype)
        if may_be_inline(code, math.prod(tensor.shape)):
            values = np.asarray(tensor.recipe.load(self._reader)).reshape(tensor.shape)
            return onnx.numpy_helper.from_array(values, name)
        proto = onnx.TensorProto(
            name=name,
            data_type=code,
            dims=tensor.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        proto.external_data.add(key="location", value=name)
        return proto


def _value_info(value: Value) -> onnx.ValueInfoProto:
    return value_info(value.name, onnx_type(value.dtype), value.shape)


def value_info(name: str, code: int, shape: tuple[Dimension, ...]) -> onnx.ValueInfoProto:
    """As ONNX's helper makes it of an onnx.TensorProto.DataType; most tensors of a graph have the
    type of others."""
    return onnx.ValueInfoProto(name=name, type=_tensor_type(code, shape))


@lru_cache(maxsize=1024)
def _tensor_type(code: int, shape: tuple[Dimension, ...]) -> onnx.TypeProto:
    """Never changed: a graph has copies."""
    return helper.make_tensor_type_proto(code, shape)


@lru_cache(maxsize=1024, typed=True)
def _attribute(name: str, value: Attribute) -> onnx.AttributeProto:
    """Never changed: a graph has copies. 1 and 1.0 are two."""
    return helper.make_attribute(name, value)
