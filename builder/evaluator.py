"""The reference evaluator: any module, source or native, run as its operators are defined.

onnx.reference has ONNX's operators. trtc's own run their references; a few of ONNX's get an
implementation here that computes in f32 and rounds once, because onnx's own computes bfloat16 in
bfloat16 (MatMul, RMSNormalization, Sigmoid) or has none (Gelu).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from trtc.builder.module import TENSORRT_DOMAIN, TRTC_DOMAIN, Module
from trtc.builder.onnx_check import is_external
from trtc.builder.recipes import Array, TensorReader
from trtc.plugins.op import FusedOp
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import cast

_Operators = list[type[OpRun]]
_E2M1_MAX = 6.0
Exchange = Callable[[str, Array], tuple[Array, ...]]
"""(a collective's node, what this rank gives) -> what every rank gives, in their order."""


def alone(node: str, given: Array) -> tuple[Array, ...]:
    """The exchange of a model that is not sharded: there is one rank."""
    return (given,)


class Evaluator:
    """A module with its weights, ready to run steps.

    Values that depend on weights alone (dequantised, transposed matrices) are computed once, at
    construction. In a sharded model, `exchange` is called for each collective, and blocks until
    every rank has called it.
    """

    def __init__(self, module: Module, reader: TensorReader, exchange: Exchange = alone) -> None:
        graph = module.model.graph
        weights = {
            initializer.name: module.recipes[initializer.name].load(reader)
            if is_external(initializer)
            else onnx.numpy_helper.to_array(initializer)
            for initializer in graph.initializer
        }
        constant, variable = _split(graph, weights)
        needed = {name for node in variable for name in node.input}
        needed |= {output.name for output in graph.output}
        produced = [name for node in constant for name in node.output if name in needed]
        self._outputs = [output.name for output in graph.output]
        self._constants = {name: weights[name] for name in weights if name in needed}
        if produced:
            values = _run(_calls(module.model, constant, exchange), weights)
            self._constants |= {name: values[name] for name in produced}
        self._step = _calls(module.model, variable, exchange)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One step: every graph input by name -> every graph output by name.

        Nothing is done in place: `kv_i_out` are new pools, to be given as `kv_i` next time.
        """
        values = _run(self._step, {**self._constants, **inputs})
        return {name: values[name] for name in self._outputs}


class _Call(NamedTuple):
    compute: Callable[..., Sequence[Any]]
    inputs: tuple[str, ...]
    """An empty name: without this one."""
    outputs: tuple[str, ...]


def _run(calls: Iterable[_Call], given: Mapping[str, Array]) -> dict[str, Any]:
    """Every value by name: those given and those computed."""
    values: dict[str, Any] = dict(given)
    for call in calls:
        inputs = [values[name] if name else None for name in call.inputs]
        values.update(zip(call.outputs, call.compute(*inputs), strict=False))
    return values


def _split(
    graph: onnx.GraphProto, weights: Mapping[str, Array]
) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Nodes that depend on weights alone, and the others."""
    known = set(weights)
    constant: list[onnx.NodeProto] = []
    variable: list[onnx.NodeProto] = []
    for node in graph.node:
        if all(name in known or not name for name in node.input):
            constant.append(node)
            known.update(node.output)
        else:
            variable.append(node)
    return constant, variable


def _calls(model: onnx.ModelProto, nodes: list[onnx.NodeProto], exchange: Exchange) -> list[_Call]:
    """The nodes in their order, bound to what computes them."""
    graph = onnx.helper.make_graph(nodes, "part", [], [])
    part = onnx.helper.make_model(
        graph, opset_imports=list(model.opset_import), ir_version=model.ir_version
    )
    operators = ReferenceEvaluator(part, new_ops=_operators(exchange)).rt_nodes_
    return [_Call(_computation(one), tuple(one.input), tuple(one.output)) for one in operators]


def _computation(operator: OpRun) -> Callable[..., Sequence[Any]]:
    """onnx's operators check the types that they are given."""
    if not isinstance(operator, _Own):
        return operator.run  # type: ignore[no-any-return]
    attributes = {name: getattr(operator, name) for name in operator.attributes_names_}
    return partial(operator._run, **attributes)


def _operators(exchange: Exchange) -> _Operators:
    fused = [_operator(op, exchange) for op in REGISTRY.values()]
    own = [MatMul, RMSNormalization, LayerNormalization, Sigmoid, Gelu, QuantizeLinear]
    return [*own, TRT_FP4DynamicQuantize, *fused]


class _Own(OpRun):  # type: ignore[misc]
    """An operator whose _run takes what onnx's run would give it, and needs no check of it."""


class _Fused(_Own):
    """Calls the reference of a trtc operator."""

    _op: ClassVar[FusedOp]
    _exchange: ClassVar[Any]
    """An Exchange."""

    @cached_property
    def _constants(self) -> dict[str, Any]:
        return _attributes(self._op, self.onnx_node)

    def _run(self, *inputs: Array | None, **_: Any) -> Sequence[Any]:
        names = [parameter.name for parameter in self._op.inputs]
        arguments: dict[str, Any] = dict.fromkeys(names)
        arguments.update(zip(names, inputs, strict=False))
        if self._op.collective:
            node = self.onnx_node.name
            arguments = {name: self._exchange(node, one) for name, one in arguments.items()}
        return self._op.reference(**arguments, **self._constants)


def _operator(op: FusedOp, exchange: Exchange) -> type[OpRun]:
    own = {"op_domain": TRTC_DOMAIN, "_op": op, "_exchange": staticmethod(exchange)}
    return type(op.name, (_Fused,), own)


def _attributes(op: FusedOp, node: onnx.NodeProto) -> dict[str, Any]:
    """The node's attributes by name, defaults filled in."""
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    unknown = set(given) - {a.name for a in op.attributes}
    assert not unknown, f"{node.name}: {op.name} has no attributes {sorted(unknown)}"
    values: dict[str, Any] = {}
    for attribute in op.attributes:
        value = given.get(attribute.name, attribute.default)
        assert value is not None, f"{node.name}: {op.name} needs {attribute.name}"
        values[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return values


def _f32(x: Array) -> NDArray[np.float32]:
    """x itself where it is f32."""
    return x.astype(np.float32, copy=False)


def _rounded(x: Array, like: Array) -> Array:
    return x if x.dtype == like.dtype == np.float32 else cast(x, str(like.dtype))


class MatMul(_Own):
    """Accumulated in f32, rounded once.

    Each row is a product of its own: with many rows BLAS would sum in another order than with one,
    and a row's result may not depend on its neighbours.
    """

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        rows, matrices = _f32(a)[..., None, :], _f32(b)[..., None, :, :]
        return (_rounded(np.matmul(rows, matrices)[..., 0, :], a),)


class RMSNormalization(_Own):
    """x / rms(x) * weight in f32 over the last axis, rounded once, as trtc.rms_norm does."""

    def _run(
        self, x: Array, scale: Array, *, axis: int, epsilon: float, stash_type: int
    ) -> tuple[Array]:
        assert axis in (-1, x.ndim - 1) and stash_type == 1
        wide = _f32(x)
        mean = np.mean(wide * wide, axis=-1, keepdims=True)
        inverse = 1.0 / np.sqrt(mean + np.float32(epsilon))
        return (_rounded(wide * inverse * _f32(scale), x),)


class LayerNormalization(_Own):
    """(x - mean) / deviation * weight + bias in f32 over the last axis, rounded once."""

    def _run(
        self,
        x: Array,
        scale: Array,
        bias: Array | None = None,
        *,
        axis: int,
        epsilon: float,
        stash_type: int,
    ) -> tuple[Array]:
        assert axis in (-1, x.ndim - 1) and stash_type == 1
        wide = _f32(x)
        wide = wide - np.mean(wide, axis=-1, keepdims=True)
        inverse = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(epsilon))
        normed = wide * inverse * _f32(scale)
        return (_rounded(normed if bias is None else normed + _f32(bias), x),)


class Sigmoid(_Own):
    """1 / (1 + exp(-x)) in f32; tanh's form does not overflow."""

    def _run(self, x: Array) -> tuple[Array]:
        return (_rounded(0.5 * (1.0 + np.tanh(0.5 * _f32(x))), x),)


class Gelu(_Own):
    """The tanh approximation in f32."""

    _CUBIC: ClassVar[float] = 0.044715

    def _run(self, x: Array, *, approximate: str) -> tuple[Array]:
        assert approximate == "tanh"
        wide = _f32(x)
        inner = np.float32(math.sqrt(2 / math.pi)) * (wide + np.float32(self._CUBIC) * wide**3)
        return (_rounded(0.5 * wide * (1.0 + np.tanh(inner)), x),)


class QuantizeLinear(_Own):
    """x / scale in f32, rounded to nearest even and saturated; trtc's graphs use no zero point."""

    def _run(self, x: Array, scale: Array, *, output_dtype: int, **_: Any) -> tuple[Array]:
        target = onnx.helper.tensor_dtype_to_np_dtype(output_dtype)
        return (cast(_f32(x) / _f32(scale), str(target)),)


class TRT_FP4DynamicQuantize(_Own):
    """Blocks of the last axis to E2M1: a block's scale is its largest value over E2M1's, 6, in
    units of `scale` and rounded to E4M3. A block whose scale rounds to zero is zero."""

    op_domain = TENSORRT_DOMAIN

    def _run(
        self, x: Array, scale: Array, *, axis: int, block_size: int, scale_type: int
    ) -> tuple[Array, Array]:
        assert axis == -1 and scale_type == onnx.TensorProto.FLOAT8E4M3FN
        blocks = _f32(x).reshape(*x.shape[:-1], -1, block_size)
        scales = cast(np.abs(blocks).max(-1) / np.float32(_E2M1_MAX) / _f32(scale), "f8e4m3")
        units = (_f32(scales) * _f32(scale))[..., None]
        quotients = np.divide(blocks, units, out=np.zeros_like(blocks), where=units != 0)
        return cast(quotients, "f4e2m1").reshape(x.shape), scales
