"""A module opened for rewriting with onnx-graphsurgeon, and closed again as a new module.

Weights stay lazy: a rewrite moves, merges or derives recipes, never bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from trtc.builder.graph_writer import may_be_inline, onnx_type
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.onnx_check import is_external
from trtc.builder.passes.matching import (
    Node,
    Tensor,
    dtype_of,
    input_of,
    input_position,
    is_op,
    output_of,
    same_recipe,
)
from trtc.builder.recipes import Apply, Cast, Constant, Recipe, Reshape
from trtc.plugins.op import TensorType
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import cast
from trtc.protos.errors import InvariantError
from trtc.protos.manifest import Limits

Array = NDArray[Any]


class Rewriter:
    """Finds, adds and replaces nodes; `module()` drops what became unused and exports.

    Tensors and nodes are graphsurgeon's, and weights are its Constants with lazy values. The
    module given is only read. After `begin` it goes on with what `module()` gave: opening a large
    module takes longer than most rewrites.
    """

    def __init__(self, module: Module) -> None:
        with _quiet():
            self.graph = gs.import_onnx(module.model)
        # The importer hands out the model's own list, and the exporter appends to it.
        self.graph.import_domains = list(self.graph.import_domains)
        self._output_names = {tensor.name for tensor in self.graph.outputs}
        self.begin(module)

    def begin(self, module: Module) -> None:
        """Start anew with the module that is open: no recipes and weights but those it has."""
        self._module = module
        self.recipes: dict[str, Recipe] = dict(module.recipes)
        self._constants: dict[str, Tensor] = {
            tensor.name: tensor
            for node in self.graph.nodes
            for tensor in node.inputs
            if isinstance(tensor, gs.Constant)
        }

    @property
    def limits(self) -> Limits:
        return self._module.limits

    # Finding

    def nodes(self, op: str, domain: str = "") -> Iterator[Node]:
        """The nodes of one operator in graph order, leaving out those that a rewrite removes."""
        for node in [node for node in self.graph.nodes if is_op(node, op, domain)]:
            if node.outputs:
                yield node

    def fused_nodes(self, op: str) -> Iterator[Node]:
        """The nodes of one of trtc's operators."""
        return self.nodes(op, TRTC_DOMAIN)

    def is_output(self, tensor: Tensor) -> bool:
        return tensor.name in self._output_names

    def sole_consumer(self, tensor: Tensor, op: str | None = None) -> Node | None:
        """The node that alone reads `tensor`, if it is the ONNX operator asked for.

        None when the tensor is a graph output or read elsewhere as well.
        """
        if self.is_output(tensor) or len(tensor.outputs) != 1:
            return None
        node = tensor.outputs[0]
        return node if op is None or is_op(node, op) else None

    def value(self, tensor: Tensor) -> Array | None:
        """The bytes of a small initialiser; None for large ones and for what is computed."""
        if not isinstance(tensor, gs.Constant):
            return None
        proto = tensor._values.tensor
        if is_external(proto):
            return None
        values: Array = onnx.numpy_helper.to_array(proto)
        return values

    def scalar(self, tensor: Tensor) -> float | None:
        """The value of an initialiser of one element."""
        values = self.value(tensor)
        return float(values.reshape(-1)[0]) if values is not None and values.size == 1 else None

    def same_weight(self, left: Tensor | None, right: Tensor | None) -> bool:
        """Whether two weights are certainly equal: absent, or of equal bytes or recipes."""
        if left is None or right is None:
            return left is right
        if left.name == right.name:
            return True
        if dtype_of(left) != dtype_of(right) or list(left.shape) != list(right.shape):
            return False
        values, others = self.value(left), self.value(right)
        if values is not None and others is not None:
            return bool(np.array_equal(values, others))
        return same_recipe(self.recipes[left.name], self.recipes[right.name])

    # Adding

    def weight(
        self,
        name: str,
        recipe: Recipe,
        dtype: str,
        shape: Sequence[int],
        value: Array | None = None,
    ) -> Tensor:
        """An initialiser; asked for again under the same name and recipe, the same one.

        `dtype` is a name of protos/dtypes.py, or "i64" for what only ONNX reads.
        """
        if name in self._constants and same_recipe(self.recipes[name], recipe):
            return self._constants[name]
        name = self._free_name(name)
        proto = weight_proto(name, dtype, shape, value)
        with _quiet():
            tensor = gs.Constant(name, LazyValues(proto))
        self.recipes[name] = recipe
        self._constants[name] = tensor
        return tensor

    def constant(self, name: str, value: Array, dtype: str) -> Tensor:
        """An initialiser computed by the builder."""
        return self.weight(name, Constant(value), dtype, value.shape, value)

    def derived(
        self,
        name: str,
        function: Callable[..., Array],
        sources: Sequence[Tensor],
        dtype: str,
        shape: Sequence[int],
    ) -> Tensor:
        """An initialiser that is a pure function of others; small ones are computed at once."""
        recipe = Apply(function, tuple(self.recipes[source.name] for source in sources))
        values = [self.value(source) for source in sources]
        inline = None
        is_small = may_be_inline(onnx_type(dtype), int(np.prod(shape)))
        if is_small and all(value is not None for value in values):
            inline = function(*values)
        return self.weight(name, recipe, dtype, shape, inline)

    def as_type(self, tensor: Tensor, dtype: str) -> Tensor:
        """A weight rounded to another element type; itself when it is of that type."""
        if dtype_of(tensor) == dtype:
            return tensor
        value = self.value(tensor)
        return self.weight(
            f"{tensor.name}.{dtype}",
            Cast(self.recipes[tensor.name], dtype),
            dtype,
            tensor.shape,
            None if value is None else cast(value, dtype),
        )

    def reshaped(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A weight under another shape, of as many elements."""
        value = self.value(tensor)
        return self.weight(
            name,
            Reshape(self.recipes[tensor.name], shape),
            dtype_of(tensor),
            shape,
            None if value is None else value.reshape(shape),
        )

    def variable(self, name: str, dtype: str, shape: Sequence[int | str]) -> Tensor:
        """A tensor that a node will produce."""
        return gs.Variable(name, dtype=onnx_type(dtype), shape=list(shape))

    def fused(
        self,
        op: str,
        name: str,
        inputs: Mapping[str, Tensor | None],
        outputs: Mapping[str, Tensor],
        attributes: Mapping[str, int | float | str],
    ) -> Node:
        """Add a node of one of trtc's operators; inputs and outputs by parameter name.

        As `node`; the outputs get the types that the operator's definition infers.
        """
        definition = REGISTRY[op]
        known = {parameter.name for parameter in definition.inputs}
        assert set(inputs) <= known, f"{op} has no inputs {set(inputs) - known}"
        ordered = [inputs.get(parameter.name) for parameter in definition.inputs]
        results = [outputs.get(parameter.name) for parameter in definition.outputs]
        while results and results[-1] is None:
            results.pop()
        node = self.node(op, name, ordered, results, attributes, TRTC_DOMAIN)
        self.retype(node)
        return node

    def node(
        self,
        op: str,
        name: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
        domain: str | None = None,
    ) -> Node:
        """Add a node; closing the module orders it after what it reads.

        Outputs that other nodes produced are taken from them, and nodes that then produce
        nothing are removed, with the nodes that only they read.
        """
        node = gs.Node(op, name, attrs=dict(attributes), domain=domain)
        node.inputs = [gs.Variable.empty() if tensor is None else tensor for tensor in inputs]
        for tensor in outputs:
            if tensor is not None:
                self._release(tensor)
        node.outputs = [gs.Variable.empty() if tensor is None else tensor for tensor in outputs]
        self.graph.nodes.append(node)
        return node

    def retype(self, node: Node) -> None:
        """Give the outputs of a node of trtc's the types that its definition infers."""
        definition = REGISTRY[node.op]
        types: dict[str, TensorType | None] = {}
        for parameter in definition.inputs:
            tensor = input_of(node, parameter.name)
            types[parameter.name] = None if tensor is None else _type_of(tensor)
        try:
            inferred = definition.infer_outputs(types, node.attrs)
        except ValueError as error:
            raise InvariantError(str(error), field=node.name) from error
        for parameter in definition.outputs:
            tensor = output_of(node, parameter.name)
            if tensor is not None and not self.is_output(tensor):
                tensor.dtype = onnx_type(inferred[parameter.name].dtype)
                tensor.shape = list(inferred[parameter.name].shape)

    def set_input(self, node: Node, parameter: str, tensor: Tensor) -> None:
        """Set one input of a node of trtc's by name, and remove what only the old one needed."""
        position = input_position(node, parameter)
        while len(node.inputs) <= position:
            node.inputs.append(gs.Variable.empty())
        producers = list(node.inputs[position].inputs)
        node.inputs[position] = tensor
        for former in producers:
            _remove_unread(former, self._output_names)

    def clear_input(self, node: Node, parameter: str) -> None:
        """Leave out one optional input of a node of trtc's."""
        if input_of(node, parameter) is not None:
            self.set_input(node, parameter, gs.Variable.empty())

    def take_output(self, node: Node, tensor: Tensor) -> None:
        """Let `node` produce `tensor` as its first output, which another node made until now."""
        producers = list(tensor.inputs)
        tensor.inputs.clear()
        node.outputs[0] = tensor
        for former in producers:
            _remove_unread(former, self._output_names)

    def give_output(self, node: Node, parameter: str, tensor: Tensor) -> None:
        """Let a node of trtc's produce `tensor`, which another node made, as an output that it went
        without until now."""
        names = [output.name for output in REGISTRY[node.op].outputs]
        position = names.index(parameter)
        producers = list(tensor.inputs)
        tensor.inputs.clear()
        while len(node.outputs) <= position:
            node.outputs.append(gs.Variable.empty())
        node.outputs[position] = tensor
        for former in producers:
            _remove_unread(former, self._output_names)

    def drop_output(self, node: Node, parameter: str) -> None:
        """Leave out the last output of a node of trtc's, which nobody reads."""
        tensor = output_of(node, parameter)
        assert tensor is node.outputs[-1] and not tensor.outputs, f"{node.name}: {parameter}"
        node.outputs.pop()

    def replace_uses(self, old: Tensor, new: Tensor) -> None:
        """Let every reader of `old` read `new`."""
        for consumer in list(old.outputs):
            consumer.inputs = [new if tensor is old else tensor for tensor in consumer.inputs]
        for node in list(old.inputs):
            _remove_unread(node, self._output_names)

    # Closing

    def module(self) -> Module:
        """The rewritten module, without what no output needs, in a stable order."""
        needed = _needed_in_order(self.graph)
        kept = set(map(id, needed))
        for node in self.graph.nodes:
            if id(node) not in kept:
                node.inputs.clear()
                node.outputs.clear()
        self.graph.nodes = needed
        with _quiet():
            model = gs.export_onnx(self.graph)
        model.metadata_props.extend(self._module.model.metadata_props)
        names = {initializer.name for initializer in model.graph.initializer}
        recipes = {name: recipe for name, recipe in self.recipes.items() if name in names}
        return Module(model, recipes, self._module.kv, self._module.limits)

    def _release(self, tensor: Tensor) -> None:
        """Take `tensor` from the node that produces it, and remove what then serves nothing."""
        producers = list(tensor.inputs)
        tensor.inputs.clear()
        for node in producers:
            _remove_unread(node, self._output_names)

    def _free_name(self, name: str) -> str:
        candidate, suffix = name, 2
        while candidate in self.recipes:
            candidate, suffix = f"{name}.{suffix}", suffix + 1
        return candidate


def weight_proto(
    name: str, dtype: str, shape: Sequence[int], value: Array | None = None
) -> onnx.TensorProto:
    """An initialiser as modules hold it: inline when small and known, else external, no bytes."""
    code = onnx_type(dtype)
    if value is not None and may_be_inline(code, value.size):
        proto = onnx.numpy_helper.from_array(value, name)
        assert proto.data_type == code, f"{name} is not {dtype}"
        return proto
    proto = onnx.TensorProto(
        name=name,
        data_type=code,
        dims=[int(extent) for extent in shape],
        data_location=onnx.TensorProto.EXTERNAL,
    )
    proto.external_data.add(key="location", value=name)
    return proto


def _remove_unread(node: Node, graph_outputs: set[str]) -> None:
    """Remove a node whose outputs are unused, then its sources likewise."""
    pending = [node]
    while pending:
        node = pending.pop()
        if any(tensor.outputs or tensor.name in graph_outputs for tensor in node.outputs):
            continue
        pending += [source for tensor in node.inputs for source in tensor.inputs]
        node.inputs.clear()
        node.outputs.clear()


def _type_of(tensor: Tensor) -> TensorType:
    return TensorType(dtype_of(tensor), tuple(tensor.shape))


def _needed_in_order(graph: Any) -> list[Node]:
    """The nodes that the outputs depend on, each after those it reads, depth first.

    Depth first keeps a layer's nodes together and lets buffers die early; it depends on the
    edges alone, so the order is stable whatever order passes added nodes in.
    """
    ordered: list[Node] = []
    done: set[int] = set()
    begun: set[int] = set()
    pending = [node for tensor in reversed(graph.outputs) for node in tensor.inputs]
    while pending:
        node = pending[-1]
        begun.add(id(node))
        sources = [source for tensor in node.inputs for source in tensor.inputs]
        waiting = next((source for source in sources if id(source) not in done), None)
        if id(node) in done or waiting is None:
            pending.pop()
            if id(node) not in done:
                done.add(id(node))
                ordered.append(node)
        else:
            assert id(waiting) not in begun, f"{waiting.name} depends on itself"
            pending.append(waiting)
    return ordered


@contextmanager
def _quiet() -> Iterator[None]:
    """Graphsurgeon warns about each type that numpy lacks (BF16, E4M3); both survive the trip."""
    before = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.ERROR
    try:
        yield
    finally:
        G_LOGGER.severity = before
