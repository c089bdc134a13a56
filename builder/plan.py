"""Native graph -> static plan: which kernel runs when, on which bytes.

Every node of the graph is an operator of the domain `trtc`, or a Split of columns, which becomes
views and costs nothing. The plan's order is the graph's order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import onnx

from trtc.builder.memory import Life, align, place
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.plugins.op import FusedOp, Parameter
from trtc.protos.dtypes import BY_ONNX, DTYPES, DTypeName
from trtc.protos.errors import InvariantError
from trtc.protos.manifest import Limits
from trtc.protos.plan import Argument, Buffer, Call, Plan, Rows, Weight, max_rows

Dim = int | str
"""A static extent, or the symbol of one that varies by step."""
Kind = Literal["buffer", "weight", "step", "pool", "logits"]

_STEP_INPUTS: dict[str, tuple[Dim, ...]] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "slots": ("T",),
    "query_start": ("B+1",),
    "context_lens": ("B",),
    "page_table": ("B", "P"),
    "logit_rows": ("R",),
}


@dataclass(frozen=True)
class _Value:
    """What a name in the graph stands for."""

    kind: Kind
    name: str
    dtype: DTypeName
    shape: tuple[Dim, ...]
    index: int = 0
    column_offset: int = 0
    row_stride: int = 0

    def argument(self, parameter: str) -> Argument:
        return Argument(
            parameter=parameter,
            kind=self.kind,
            name=self.name,
            dtype=self.dtype,
            index=self.index,
            column_offset=self.column_offset,
            row_stride=self.row_stride,
            columns=self.columns,
        )

    @property
    def columns(self) -> int:
        last = self.shape[-1] if len(self.shape) > 1 else 1
        return last if isinstance(last, int) else 0


def make_plan(module: Module, operators: Mapping[str, FusedOp]) -> Plan:
    """Lower a native graph.

    Raises:
        InvariantError: the graph has a node that no kernel runs, or shapes that disagree.
    """
    planner = _Planner(module, operators)
    for node in module.model.graph.node:
        if node.domain == TRTC_DOMAIN:
            planner.add_call(node)
        elif node.op_type == "Split":
            planner.add_views(node)
        else:
            raise InvariantError(
                f"no kernel runs {node.domain or 'ai.onnx'}.{node.op_type}", field=node.name
            )
    return planner.finish()


class _Planner:
    """The walk over the nodes: names seen so far, calls and weights in order of use."""

    def __init__(self, module: Module, operators: Mapping[str, FusedOp]) -> None:
        graph = module.model.graph
        self.module = module
        self.operators = operators
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.values = _graph_inputs(module)
        self.logits = graph.output[0].name
        self.weights: dict[str, Weight] = {}
        self.calls: list[Call] = []
        self.buffers: dict[str, tuple[Rows, int, DTypeName]] = {}
        self.lives: dict[str, tuple[int, int]] = {}
        self.vocab_size = 0

    def add_call(self, node: onnx.NodeProto) -> None:
        operator = self.operators.get(node.op_type)
        if operator is None:
            raise InvariantError(f"no operator trtc.{node.op_type}", field=node.name)
        attributes = _attributes(node, operator)
        axes: dict[str, Dim] = {
            name: value for name, value in attributes.items() if isinstance(value, int)
        }
        inputs = self._inputs(node, operator, attributes)
        for parameter, value in inputs:
            _bind(axes, parameter, value, node.name)
        outputs = self._outputs(node, operator, attributes, axes, inputs)
        arguments = tuple(value.argument(parameter.name) for parameter, value in inputs + outputs)
        varying = {name: value for name, value in axes.items() if name not in attributes}
        self._touch(arguments)
        self.calls.append(
            Call(
                operator=operator.name,
                site=node.name,
                arguments=arguments,
                attributes=attributes,
                axes=varying,
            )
        )

    def add_views(self, node: onnx.NodeProto) -> None:
        """Split along columns: every output is a view of the input's memory."""
        source = self.values[node.input[0]]
        total = source.columns
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if axis not in (1, -1) or source.kind != "buffer":
            raise InvariantError("only columns of an activation can be split", field=node.name)
        sizes = self._split_sizes(node, total)
        offset = source.column_offset
        for name, size in zip(node.output, sizes, strict=True):
            self.values[name] = replace(source, shape=(source.shape[0], size), column_offset=offset)
            offset += size
        if offset - source.column_offset != total:
            raise InvariantError(f"parts {sizes} do not add up to {total}", field=node.name)

    def finish(self) -> Plan:
        names = list(self.buffers)
        limits = self.module.limits
        offsets, arena = place(
            [Life(_buffer_bytes(*self.buffers[name], limits), *self.lives[name]) for name in names]
        )
        buffers = tuple(
            Buffer(name=name, rows=rows, columns=columns, dtype=dtype, offset=offset)
            for name, offset in zip(names, offsets, strict=True)
            for rows, columns, dtype in (self.buffers[name],)
        )
        weights = tuple(self.weights.values())
        return Plan(
            limits=limits,
            kv=self.module.kv,
            vocab_size=self.vocab_size,
            buffers=buffers,
            weights=weights,
            calls=tuple(self.calls),
            arena_bytes=arena,
            weights_bytes=align(weights[-1].offset + weights[-1].bytes) if weights else 0,
        )

    def _inputs(
        self,
        node: onnx.NodeProto,
        operator: FusedOp,
        attributes: Mapping[str, int | float | str],
    ) -> list[tuple[Parameter, _Value]]:
        found = []
        for position, parameter in enumerate(operator.inputs):
            name = node.input[position] if position < len(node.input) else ""
            if not name:
                if not parameter.optional:
                    raise InvariantError(f"{parameter.name} is missing", field=node.name)
                continue
            value = self.values.get(name) or self._weight(name, attributes)
            if value.dtype not in parameter.dtypes:
                raise InvariantError(
                    f"{parameter.name} is {value.dtype}, not one of {parameter.dtypes}",
                    field=node.name,
                )
            found.append((parameter, value))
        return found

    def _weight(self, name: str, attributes: Mapping[str, int | float | str]) -> _Value:
        """A weight's offset is settled when it is first used, so that a step reads forwards."""
        tensor = self.initializers.get(name)
        if tensor is None:
            raise InvariantError("nothing defines it", field=name)
        dtype = BY_ONNX[tensor.data_type]
        shape = tuple(tensor.dims)
        if name not in self.weights:
            size = 1
            for dim in shape:
                size *= dim
            end = 0
            if self.weights:
                last = next(reversed(self.weights.values()))
                end = align(last.offset + last.bytes)
            packed = attributes.get("layout") == "packed" and dtype.name == "u8"
            self.weights[name] = Weight(
                name=name,
                dtype=dtype.name,
                shape=shape,
                layout=f"packed_{attributes['weight_dtype']}" if packed else "row_major",
                offset=end,
                bytes=dtype.num_bytes(size),
            )
        stride = shape[-1] if shape else 1
        return _Value("weight", name, dtype.name, shape, row_stride=stride)

    def _outputs(
        self,
        node: onnx.NodeProto,
        operator: FusedOp,
        attributes: Mapping[str, int | float | str],
        axes: dict[str, Dim],
        inputs: Sequence[tuple[Parameter, _Value]],
    ) -> list[tuple[Parameter, _Value]]:
        given = {parameter.name: value for parameter, value in inputs}
        activation = next(
            (value.dtype for parameter, value in inputs if parameter.role == "activation"), "f32"
        )
        found = []
        for position, parameter in enumerate(operator.outputs):
            name = node.output[position] if position < len(node.output) else ""
            if not name:
                if not parameter.optional:
                    raise InvariantError(f"{parameter.name} is missing", field=node.name)
                continue
            if parameter.name in operator.in_place:
                value = given[operator.in_place[parameter.name]]
            else:
                dtype = attributes.get("out_dtype", activation) if position == 0 else activation
                shape = tuple(evaluate(axis, axes) for axis in parameter.axes)
                value = self._new_buffer(name, cast(DTypeName, dtype), shape, node.name)
            self.values[name] = value
            found.append((parameter, value))
        return found

    def _new_buffer(self, name: str, dtype: DTypeName, shape: tuple[Dim, ...], site: str) -> _Value:
        rows, columns = shape
        if not isinstance(columns, int):
            raise InvariantError(f"{name} has {columns} columns", field=site)
        if name == self.logits:
            self.vocab_size = columns
            return _Value("logits", "logits", dtype, shape, row_stride=columns)
        self.buffers[name] = (cast(Rows, rows), columns, dtype)
        return _Value("buffer", name, dtype, shape, row_stride=columns)

    def _touch(self, arguments: Sequence[Argument]) -> None:
        now = len(self.calls)
        for argument in arguments:
            if argument.kind == "buffer":
                first, _ = self.lives.get(argument.name, (now, now))
                self.lives[argument.name] = (first, now)

    def _split_sizes(self, node: onnx.NodeProto, total: int) -> list[int]:
        if len(node.input) > 1 and node.input[1]:
            return [int(n) for n in onnx.numpy_helper.to_array(self.initializers[node.input[1]])]
        return [total // len(node.output)] * len(node.output)


def evaluate(expression: str, axes: Mapping[str, Dim]) -> Dim:
    """Value of an axis: a symbol, a number, or a product such as `num_heads*head_dim`."""
    if expression in axes:
        return axes[expression]
    if expression.isdigit():
        return int(expression)
    product = 1
    for factor in expression.split("*"):
        value = axes.get(factor) if not factor.isdigit() else int(factor)
        if not isinstance(value, int):
            raise InvariantError(f"cannot evaluate the axis {expression} with {dict(axes)}")
        product *= value
    return product


def _bind(axes: dict[str, Dim], parameter: Parameter, value: _Value, site: str) -> None:
    """Give the parameter's axis symbols their values, or check those that have one."""
    if len(parameter.axes) != len(value.shape):
        # Packed weights are bytes, and a scalar may be spelled [1]: neither binds anything.
        return
    for axis, extent in zip(parameter.axes, value.shape, strict=True):
        if axis.isidentifier():
            bound = axes.setdefault(axis, extent)
        elif axis == extent or not all(f.isdigit() or f in axes for f in axis.split("*")):
            continue
        else:
            bound = evaluate(axis, axes)
        if bound != extent:
            raise InvariantError(
                f"{parameter.name} has {axis} = {extent}, but it is {bound}", field=site
            )


def _graph_inputs(module: Module) -> dict[str, _Value]:
    values = {
        name: _Value("step", name, "i32", shape, row_stride=1)
        for name, shape in _STEP_INPUTS.items()
    }
    kv = module.kv
    shape: tuple[Dim, ...] = ("num_pages", 2, kv.page_size, kv.num_kv_heads, kv.head_dim)
    for index in range(kv.num_layers):
        values[f"kv_{index}"] = _Value("pool", f"kv_{index}", kv.dtype, shape, index=index)
    return values


def _attributes(node: onnx.NodeProto, operator: FusedOp) -> dict[str, int | float | str]:
    given: dict[str, Any] = {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    unknown = set(given) - {attribute.name for attribute in operator.attributes}
    if unknown:
        raise InvariantError(f"unknown attributes {sorted(unknown)}", field=node.name)
    result: dict[str, int | float | str] = {}
    for attribute in operator.attributes:
        value = given.get(attribute.name, attribute.default)
        if value is None:
            raise InvariantError(f"the attribute {attribute.name} is missing", field=node.name)
        if isinstance(value, bytes):
            value = value.decode()
        result[attribute.name] = float(value) if attribute.kind == "float" else value
    return result


def _buffer_bytes(rows: Rows, columns: int, dtype: DTypeName, limits: Limits) -> int:
    return DTYPES[dtype].num_bytes(max_rows(rows, limits) * columns)
