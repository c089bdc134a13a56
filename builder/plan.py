"""Native graph -> static plan: the sequence of kernel calls and the memory of their arguments.

Every node of the graph is an operator of the domain `trtc`, or a Split of columns, which becomes
views and costs nothing. The plan's order is the graph's order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import onnx

from trtc.builder.fills import dummy_fill
from trtc.builder.memory import Life, align
from trtc.builder.memory import place as place_lives
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.plugins.layouts import WEIGHTS
from trtc.plugins.op import Extent, FusedOp, Parameter, TensorType
from trtc.protos.dtypes import BY_ONNX, DTYPES, DTypeName
from trtc.protos.errors import InvariantError
from trtc.protos.kv import CacheLayout, Place
from trtc.protos.plan import Argument, Buffer, Call, Plan, Rows, Weight, max_rows
from trtc.protos.step import graph_inputs

Kind = Literal["buffer", "weight", "step", "pool", "logits"]

_IN_TILES = frozenset(
    f"{weight}{part}"
    for weights in WEIGHTS.values()
    for weight in weights
    for part in ("", "_scale", "_zero")
) | {"table", "table_scale"}
"""Parameters that the layout `tiles` reorders."""


@dataclass(frozen=True)
class _Value:
    """What a name in the graph stands for."""

    kind: Kind
    name: str
    dtype: DTypeName
    shape: tuple[Extent, ...]
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


def make_plan(
    module: Module, operators: Mapping[str, FusedOp], *, max_logit_rows: int | None = None
) -> Plan:
    """Lower a native graph.

    Args:
        max_logit_rows: of one step; None: as many as tokens.

    Raises:
        InvariantError: the graph has a node that no kernel runs, or shapes that disagree.
    """
    planner = _Planner(module, operators, max_logit_rows)
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

    def __init__(
        self, module: Module, operators: Mapping[str, FusedOp], max_logit_rows: int | None
    ) -> None:
        graph = module.model.graph
        self.module = module
        self.max_logit_rows = max_logit_rows
        self.operators = operators
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.values = _graph_inputs(module)
        self.logits = graph.output[0].name
        self.weights: dict[str, Weight] = {}
        self.weights_end = 0
        self.calls: list[Call] = []
        self.buffers: dict[str, tuple[Rows, int, DTypeName]] = {}
        self.lives: dict[str, tuple[int, int]] = {}
        self.vocab_size = 0

    def add_call(self, node: onnx.NodeProto) -> None:
        operator = self.operators.get(node.op_type)
        if operator is None:
            raise InvariantError(f"no operator trtc.{node.op_type}", field=node.name)
        try:
            attributes = operator.complete_attributes(_attributes(node))
            given = self._inputs(node, operator)
            types = {
                parameter.name: _tensor_type(parameter, given[parameter.name])
                for parameter in operator.inputs
            }
            axes = operator.bind_axes(types, attributes)
            inferred = operator.infer_outputs(types, attributes)
            _check_rows(operator, axes)
        except (ValueError, KeyError) as error:
            raise InvariantError(str(error), field=node.name) from error
        for name, value in given.items():
            if value is not None and value.kind == "weight":
                self._place_weight(name, value, attributes, axes)
        made = self._outputs(node, operator, given, inferred)
        arguments = tuple(
            value.argument(name) for name, value in (*given.items(), *made.items()) if value
        )
        self._touch(arguments)
        self.calls.append(
            Call(
                operator=operator.name,
                site=node.name,
                arguments=arguments,
                attributes=attributes,
                axes={name: extent for name, extent in axes.items() if name not in attributes},
            )
        )

    def add_views(self, node: onnx.NodeProto) -> None:
        """Split along columns: every output is a view of the input's memory."""
        source = self.values.get(node.input[0])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if source is None or axis not in (1, -1) or source.kind != "buffer":
            raise InvariantError("only columns of an activation can be split", field=node.name)
        total = source.columns
        sizes = self._split_sizes(node, total)
        offset = source.column_offset
        for name, size in zip(node.output, sizes, strict=True):
            self.values[name] = replace(source, shape=(source.shape[0], size), column_offset=offset)
            offset += size
        if offset - source.column_offset != total:
            raise InvariantError(f"parts {sizes} do not add up to {total}", field=node.name)

    def finish(self) -> Plan:
        owners = self._memory_owners()
        names = list(dict.fromkeys(owners.values()))
        limits = self.module.limits
        lives = [
            self._life(name, [n for n, owner in owners.items() if owner == name]) for name in names
        ]
        offsets, arena = place_lives(lives)
        places = dict(zip(names, offsets, strict=True))
        buffers = tuple(
            Buffer(name=name, rows=rows, columns=columns, dtype=dtype, offset=places[owners[name]])
            for name, (rows, columns, dtype) in self.buffers.items()
        )
        return Plan(
            limits=limits,
            kv=self.module.kv,
            vocab_size=self.vocab_size,
            buffers=buffers,
            weights=tuple(self.weights.values()),
            calls=tuple(self.calls),
            arena_bytes=arena,
            weights_bytes=self.weights_end,
        )

    def _memory_owners(self) -> dict[str, str]:
        """Buffer -> the buffer whose memory it has: its own, or that of an input it overwrites.

        A residual stream thus stays in one place from the embedding to the last layer.
        """
        owners = {name: name for name in self.buffers}
        for number, call in enumerate(self.calls):
            used = {argument.parameter: argument for argument in call.arguments}
            for output, source in self.operators[call.operator].overwrites.items():
                if source not in used or used[output].kind != "buffer":
                    continue
                old, new = used[source].name, used[output].name
                uses = sum(argument.name == old for argument in call.arguments)
                if (
                    used[source].kind == "buffer"
                    and self.buffers[old] == self.buffers[new]
                    and self.lives[old][1] == number
                    and uses == 1
                ):
                    owners[new] = owners[old]
        return owners

    def _life(self, owner: str, members: Sequence[str]) -> Life:
        spans = [self.lives[name] for name in members]
        rows, columns, dtype = self.buffers[owner]
        most = max_rows(rows, self.module.limits)
        if rows == "R" and self.max_logit_rows is not None:
            most = min(most, self.max_logit_rows)
        return Life(
            DTYPES[dtype].num_bytes(most * columns),
            min(first for first, _ in spans),
            max(last for _, last in spans),
        )

    def _inputs(self, node: onnx.NodeProto, operator: FusedOp) -> dict[str, _Value | None]:
        names = [*node.input, *[""] * (len(operator.inputs) - len(node.input))]
        return {
            parameter.name: (self.values.get(name) or self._weight(name)) if name else None
            for parameter, name in zip(operator.inputs, names, strict=True)
        }

    def _weight(self, name: str) -> _Value:
        tensor = self.initializers.get(name)
        if tensor is None:
            raise InvariantError("nothing defines it", field=name)
        shape = tuple(tensor.dims)
        stride = shape[-1] if shape else 1
        return _Value("weight", name, BY_ONNX[tensor.data_type].name, shape, row_stride=stride)

    def _place_weight(
        self,
        parameter: str,
        value: _Value,
        attributes: Mapping[str, int | float | str],
        axes: Mapping[str, Extent],
    ) -> None:
        """A weight lies where it is first used, so that a step reads the file forwards."""
        if value.name in self.weights:
            return
        self.weights[value.name] = Weight(
            name=value.name,
            dtype=value.dtype,
            shape=tuple(int(extent) for extent in value.shape),
            layout=_layout(parameter, value, attributes),
            offset=self.weights_end,
            bytes=DTYPES[value.dtype].num_bytes(math.prod(int(n) for n in value.shape)),
            fill=dummy_fill(parameter, value.dtype, attributes, axes),
        )
        self.weights_end = align(self.weights_end + self.weights[value.name].bytes)

    def _outputs(
        self,
        node: onnx.NodeProto,
        operator: FusedOp,
        given: Mapping[str, _Value | None],
        inferred: Mapping[str, TensorType],
    ) -> dict[str, _Value | None]:
        names = [*node.output, *[""] * (len(operator.outputs) - len(node.output))]
        made: dict[str, _Value | None] = {}
        for parameter, name in zip(operator.outputs, names, strict=True):
            if not name and not parameter.optional:
                raise InvariantError(f"{parameter.name} is missing", field=node.name)
            if not name:
                continue
            source = operator.in_place.get(parameter.name)
            value = given[source] if source else None
            self.values[name] = value or self._new_buffer(name, inferred[parameter.name], node)
            made[parameter.name] = self.values[name]
        return made

    def _new_buffer(self, name: str, tensor: TensorType, node: onnx.NodeProto) -> _Value:
        rows, columns = tensor.shape
        dtype = cast(DTypeName, tensor.dtype)
        if rows not in get_args(Rows) or not isinstance(columns, int):
            raise InvariantError(f"{name} has the shape {tensor.shape}", field=node.name)
        if name == self.logits:
            self.vocab_size = columns
            return _Value("logits", "logits", dtype, tensor.shape, row_stride=columns)
        self.buffers[name] = (cast(Rows, rows), columns, dtype)
        return _Value("buffer", name, dtype, tensor.shape, row_stride=columns)

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


def _graph_inputs(module: Module) -> dict[str, _Value]:
    values = {
        name: _Value("step", one.name, one.dtype, one.shape, row_stride=1, index=group)
        for name, one, group in graph_inputs(len(module.kv.groups))
    }
    for one in module.kv.places:
        values[one.name] = _pool(module.kv, one)
    return values


def _pool(kv: CacheLayout, place: Place) -> _Value:
    """Tokens fill a page's row of a region; a state is some columns of that row."""
    dtype, row_stride, offset = place.entry.element, 0, 0
    if kv.groups[place.group].is_state:
        size = DTYPES[dtype].num_bytes(1)
        row_stride, offset = kv.region_bytes[place.region] // size, place.offset // size
    return _Value(
        "pool",
        place.name,
        dtype,
        kv.pool_shape(place),
        index=place.region,
        column_offset=offset,
        row_stride=row_stride,
    )


def _tensor_type(parameter: Parameter, value: _Value | None) -> TensorType | None:
    """A packed weight is a row of bytes, which says nothing about its logical axes."""
    if value is None:
        return None
    packed = value.dtype == "u8" and len(value.shape) == 1 != len(parameter.axes)
    return TensorType(value.dtype, parameter.axes if packed else value.shape)


def _layout(parameter: str, value: _Value, attributes: Mapping[str, int | float | str]) -> str:
    if attributes.get("layout") == "tiles":
        return "tiles" if parameter in _IN_TILES else "row_major"
    # A u8 tensor that is no zero point and no scale (E8M0) is bytes of a packed weight.
    if value.dtype != "u8" or parameter.endswith(("_zero", "_scale")):
        return "row_major"
    if attributes.get("layout") in ("planes", "compact", "split"):
        return str(attributes["layout"])
    return f"packed_{attributes['weight_dtype']}"


def _check_rows(operator: FusedOp, axes: Mapping[str, Extent]) -> None:
    """Kernels take row axes from the step; one of fixed length means a weight took their place."""
    fixed = [axis for axis in operator.row_axes if isinstance(axes.get(axis), int)]
    if fixed:
        raise ValueError(f"{', '.join(fixed)} of {operator.name} must vary by step")


def _attributes(node: onnx.NodeProto) -> dict[str, int | float | str]:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {
        name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()
    }
