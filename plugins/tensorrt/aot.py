"""Registration of the operators' ahead-of-time TensorRT plugins (`tensorrt.plugin`)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

import numpy as np

from trtc.plugins.op import FusedOp, Parameter
from trtc.protos.bundle import KernelFacts
from trtc.protos.errors import InvariantError

TYPE_NAMES: Mapping[str, str] = {"f32": "FP32", "bf16": "BF16", "f16": "FP16", "f8e4m3": "FP8"}
"""trtc -> the names that AutoTuneCombination takes."""
_DTYPES: Mapping[str, str] = {"FLOAT": "f32", "BF16": "bf16", "HALF": "f16", "FP8": "f8e4m3"}
"""Names of trt.DataType -> trtc."""


@dataclass(frozen=True)
class Kernels:
    """A bundle's kernels, as its plugins look them up."""

    facts: tuple[KernelFacts, ...]
    read: Callable[[str], bytes]
    """A file of the bundle by its name there."""

    def find(
        self, op: str, dtypes: Mapping[str, str], attributes: Mapping[str, int | float], tactic: int
    ) -> KernelFacts:
        """The kernel of a node.

        Args:
            attributes: as TensorRT hands them over, floats rounded to f32.

        Raises:
            InvariantError: the bundle has none.
        """
        for kernel in self.facts:
            if (
                kernel.op == op
                and kernel.tactic == tactic
                and kernel.dtypes == dict(dtypes)
                and all(_same(kernel.attributes[name], attributes[name]) for name in attributes)
            ):
                return kernel
        raise InvariantError(
            f"the bundle has no kernel for {dict(dtypes)} {dict(attributes)}, tactic {tactic}",
            field=op,
        )

    def tactics(self, op: str) -> list[int]:
        return sorted({kernel.tactic for kernel in self.facts if kernel.op == op})

    def types(self, op: str, parameter: str) -> str:
        """The one element type that a bundle's nodes have for a parameter, as TensorRT's name."""
        found = {kernel.dtypes[parameter] for kernel in self.facts if kernel.op == op}
        assert len(found) == 1, f"{op}.{parameter} has several types: {found}"
        return TYPE_NAMES[found.pop()]


def dtype_name(tensor: Any) -> str:
    """The element type of a TensorDesc as trtc calls it."""
    return _DTYPES[tensor.dtype.name]


def launch_params(trtp: Any, kernel: KernelFacts, grid: tuple[Any, Any]) -> Any:
    """KernelLaunchParams of a kernel over a grid of symbolic or known size."""
    params = trtp.KernelLaunchParams()
    params.grid_x, params.grid_y = grid
    params.block_x = kernel.num_threads
    params.shared_mem = kernel.shared_bytes
    return params


def _same(stored: int | float | str, given: int | float) -> bool:
    return not isinstance(stored, str) and bool(np.float32(stored) == np.float32(given))


@dataclass(frozen=True)
class Node:
    """A node as TensorRT passes it to its plugin."""

    tensors: Mapping[str, Any]
    """TensorDesc by the operator's names of its inputs."""
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Plugin:
    """What one operator's ahead-of-time plugin declares."""

    op: FusedOp
    inputs: tuple[Parameter, ...]
    """Of the operator; all are there."""
    key: tuple[str, ...]
    """Inputs by whose types its kernel is chosen."""
    same_type: Mapping[str, str]
    """Other inputs and outputs -> that of `key` whose type they have. The rest have only one."""
    describe: Callable[[Node], Any]
    """The outputs: one TensorDesc, or a tuple of them."""
    launch: Callable[[Node, KernelFacts], tuple[tuple[Any, Any], tuple[Any, ...]]]
    """(grid, integers after the inputs), symbolic or known."""


def register_plugin(trtp: Any, kernels: Kernels, plugin: Plugin, *, lazy: bool) -> None:
    """Make it known to TensorRT, once a process.

    TensorRT reads what a plugin takes from the signatures of three functions, and checks them
    against each other; all three are the operator's definition here.

    Args:
        trtp: the module `tensorrt.plugin`.
        lazy: leave TensorRT's registry alone (tests without the library).
    """
    name, desc = f"trtc::{plugin.op.name}", trtp.TensorDesc
    outputs = GenericAlias(tuple, (desc,) * len(plugin.op.outputs))
    tensors = {parameter.name: desc for parameter in plugin.inputs}
    attributes = {one.name: _ANNOTATIONS[one.kind] for one in plugin.op.attributes}

    def node_of(given: Mapping[str, Any]) -> Node:
        return Node(
            tensors={name: given[name] for name in tensors},
            attributes={name: given[name] for name in attributes},
        )

    def autotune(given: Mapping[str, Any]) -> Any:
        combination = trtp.AutoTuneCombination()
        for position, parameter in enumerate((*plugin.inputs, *plugin.op.outputs)):
            combination.pos([position], _type_of(plugin, kernels, parameter))
        combination.tactics(kernels.tactics(plugin.op.name))
        return [combination]

    def implement(given: Mapping[str, Any]) -> Any:
        node = node_of(given)
        kernel = kernels.find(
            plugin.op.name,
            {name: dtype_name(node.tensors[name]) for name in plugin.key},
            # Enum attributes are derived from the types.
            {name: node.attributes[name] for name in attributes if attributes[name] is not str},
            given["tactic"],
        )
        grid, integers = plugin.launch(node, kernel)
        scalars = trtp.SymIntExprs(len(integers))
        for index, integer in enumerate(integers):
            scalars[index] = trtp.SymInt32(integer)
        return kernel.entry, kernels.read(kernel.ptx), launch_params(trtp, kernel, grid), scalars

    # TensorRT 11.4 accepts fewer attributes in aot_impl, and then passes all of them.
    trtp.register(name, lazy_register=lazy)(
        _signed(
            lambda given: plugin.describe(node_of(given)),
            tensors | attributes,
            desc if len(plugin.op.outputs) == 1 else outputs,
        )
    )
    trtp.autotune(name)(
        _signed(autotune, tensors | {"outputs": outputs}, list[trtp.AutoTuneCombination])
    )
    trtp.aot_impl(name)(
        _signed(
            implement,
            tensors | attributes | {"outputs": outputs, "tactic": int},
            tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs],
        )
    )


_ANNOTATIONS: Mapping[str, type] = {"int": int, "float": float, "enum": str}


def _type_of(plugin: Plugin, kernels: Kernels, parameter: Parameter) -> str:
    """TensorRT's name of a tensor's type."""
    key = plugin.same_type.get(parameter.name, parameter.name)
    if key in plugin.key:
        return kernels.types(plugin.op.name, key)
    (dtype,) = parameter.dtypes
    return "INT32" if dtype == "i32" else TYPE_NAMES[dtype]


def _signed(
    function: Callable[[Mapping[str, Any]], Any], parameters: Mapping[str, Any], answer: Any
) -> Any:
    """A function of so many arguments by these names, which calls `function` with all of them."""
    signature = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in parameters.items()
        ],
        return_annotation=answer,
    )

    def signed(*given: Any, **named: Any) -> Any:
        return function(signature.bind(*given, **named).arguments)

    signed.__signature__ = signature  # type: ignore[attr-defined]
    return signed
