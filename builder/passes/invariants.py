"""Invariants of every module, checked before the first pass and after each."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import onnx

from trtc.builder.graph_writer import may_be_inline
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.onnx_check import check_module as check_onnx
from trtc.builder.onnx_check import is_external
from trtc.plugins.op import FusedOp, TensorType
from trtc.plugins.registry import REGISTRY
from trtc.protos.dtypes import BY_ONNX
from trtc.protos.errors import InvariantError


def check_module(module: Module) -> None:
    """Check one module against the rules that every pass must keep.

    - onnx.checker accepts it (weights stand in as graph inputs: their bytes are elsewhere);
    - node names and tensor names are unique, and every tensor read is defined before;
    - every initialiser has a recipe and every recipe an initialiser; large ones are external;
    - every node of trtc's has inputs, outputs, attributes and types that its definition allows.

    Raises:
        InvariantError: the first rule broken, naming the node or tensor.
    """
    _check_weights(module)
    _check_names(module.model.graph)
    try:
        check_onnx(module)
    except onnx.checker.ValidationError as error:
        raise InvariantError(f"onnx.checker refuses the graph: {error}") from error
    types = _types(module.model.graph)
    for node in module.model.graph.node:
        if node.domain == TRTC_DOMAIN:
            _check_fused(node, types)


def _check_weights(module: Module) -> None:
    names = {tensor.name for tensor in module.model.graph.initializer}
    for name in sorted(names ^ set(module.recipes)):
        problem = "has no recipe" if name in names else "has a recipe but is not in the graph"
        raise InvariantError(f"weight {problem}", field=name)
    for tensor in module.model.graph.initializer:
        if is_external(tensor):
            continue
        elements = 1
        for extent in tensor.dims:
            elements *= extent
        if not may_be_inline(tensor.data_type, elements):
            raise InvariantError(f"{elements} elements are inline", field=tensor.name)


def _check_names(graph: onnx.GraphProto) -> None:
    repeated = [name for name, count in Counter(n.name for n in graph.node).items() if count > 1]
    if repeated:
        raise InvariantError("two nodes have this name", field=repeated[0] or "(no name)")
    defined = {tensor.name for tensor in (*graph.input, *graph.initializer)}
    for node in graph.node:
        for name in node.input:
            if name and name not in defined:
                raise InvariantError(f"{node.name} reads it before it is made", field=name)
        for name in node.output:
            if name in defined:
                raise InvariantError(f"{node.name} makes it a second time", field=name)
            if name:
                defined.add(name)
    for output in graph.output:
        if output.name not in defined:
            raise InvariantError("nothing makes this graph output", field=output.name)


def _types(graph: onnx.GraphProto) -> dict[str, TensorType]:
    """The tensors whose element type and shape the graph states."""
    types = {
        tensor.name: TensorType(BY_ONNX[tensor.data_type].name, tuple(tensor.dims))
        for tensor in graph.initializer
        if tensor.data_type in BY_ONNX
    }
    for info in (*graph.input, *graph.value_info, *graph.output):
        if stated := _stated(info.type.SerializeToString()):
            types[info.name] = stated
    return types


@lru_cache(maxsize=4096)
def _stated(serialized: bytes) -> TensorType | None:
    """What an onnx.TypeProto says of a tensor. Most have the type of others."""
    tensor = onnx.TypeProto.FromString(serialized).tensor_type
    if tensor.elem_type not in BY_ONNX or not tensor.HasField("shape"):
        return None
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return TensorType(BY_ONNX[tensor.elem_type].name, shape)


def _check_fused(node: onnx.NodeProto, types: dict[str, TensorType]) -> None:
    """Check one node against its definition, as far as the types of its inputs are stated."""
    definition = REGISTRY.get(node.op_type)
    if definition is None:
        raise InvariantError(f"trtc has no operator {node.op_type}", field=node.name)
    if len(node.input) > len(definition.inputs) or len(node.output) > len(definition.outputs):
        raise InvariantError("more inputs or outputs than it has", field=node.name)
    attributes = dict(_attribute(attribute.SerializeToString()) for attribute in node.attribute)
    given = dict(zip((p.name for p in definition.inputs), node.input, strict=False))
    inputs = {name: types.get(tensor) if tensor else None for name, tensor in given.items()}
    try:
        if all(types.get(tensor) for tensor in given.values() if tensor):
            inferred = _inferred(node.op_type, (*inputs.items(),), (*attributes.items(),))
            _check_outputs(node, definition, inferred, types)
        else:
            definition.complete_attributes(attributes)
    except ValueError as error:
        raise InvariantError(str(error), field=node.name) from error


@lru_cache(maxsize=4096)
def _inferred(
    operator: str,
    inputs: tuple[tuple[str, TensorType | None], ...],
    attributes: tuple[tuple[str, int | float | str], ...],
) -> Mapping[str, TensorType]:
    """The outputs of a call. Layers have the same, and most passes leave most calls as they are."""
    return REGISTRY[operator].infer_outputs(dict(inputs), dict(attributes))


def _check_outputs(
    node: onnx.NodeProto,
    definition: FusedOp,
    inferred: Mapping[str, TensorType],
    types: dict[str, TensorType],
) -> None:
    """Stated output types must be the inferred ones (an extent's name may differ)."""
    for parameter, name in zip(definition.outputs, node.output, strict=False):
        stated, found = types.get(name), inferred[parameter.name]
        if stated is None:
            continue
        pairs = zip(stated.shape, found.shape, strict=False)
        clash = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
        if stated.dtype != found.dtype or len(stated.shape) != len(found.shape) or clash:
            raise ValueError(f"{name} is stated as {stated} and computed as {found}")


@lru_cache(maxsize=4096)
def _attribute(serialized: bytes) -> tuple[str, int | float | str]:
    """Name and value of an onnx.AttributeProto, which most nodes have in common with others."""
    attribute = onnx.AttributeProto.FromString(serialized)
    value = onnx.helper.get_attribute_value(attribute)
    return attribute.name, value.decode() if isinstance(value, bytes) else value
