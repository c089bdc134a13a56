"""Queries about nodes, tensors and weights; nothing here changes a graph."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtc.builder.module import TRTC_DOMAIN
from trtc.builder.recipes import Constant, Recipe
from trtc.plugins.registry import REGISTRY
from trtc.protos.dtypes import BY_ONNX

Node = Any
"""onnx_graphsurgeon.Node: graphsurgeon has no types of its own."""
Tensor = Any
"""onnx_graphsurgeon.Variable or Constant."""


def is_op(node: Node | None, op: str, domain: str = "") -> bool:
    return node is not None and node.op == op and (node.domain or "") == domain


def is_fused(node: Node | None, op: str) -> bool:
    return is_op(node, op, TRTC_DOMAIN)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is an initialiser."""
    return isinstance(tensor, gs.Constant)


def producer(tensor: Tensor, op: str | None = None) -> Node | None:
    """The node that computes `tensor`, if there is one (and it is the ONNX operator asked for)."""
    node = tensor.inputs[0] if tensor.inputs else None
    return node if op is None or is_op(node, op) else None


def input_position(node: Node, parameter: str) -> int:
    return [item.name for item in REGISTRY[node.op].inputs].index(parameter)


def input_of(node: Node, parameter: str) -> Tensor | None:
    """An input of one of trtc's nodes by name; None when it is absent."""
    position = input_position(node, parameter)
    if position >= len(node.inputs) or node.inputs[position].is_empty():
        return None
    return node.inputs[position]


def has_powers(moe: Node) -> bool:
    """Whether a moe node has E2M1 weights with E8M0 scales: they have no units."""
    is_e2m1 = moe.attrs["weight_dtype"] == "f4e2m1"
    return is_e2m1 and input_of(moe, "gate_up_scale_unit") is None


def output_of(node: Node, parameter: str) -> Tensor | None:
    """An output of one of trtc's nodes by name; None when it is absent."""
    names = [output.name for output in REGISTRY[node.op].outputs]
    position = names.index(parameter)
    if position >= len(node.outputs) or node.outputs[position].is_empty():
        return None
    return node.outputs[position]


def dtype_of(tensor: Tensor) -> str:
    """The element type by its name in protos/dtypes.py."""
    assert tensor.dtype is not None, f"the type of {tensor.name} is not known"
    code = (
        tensor.dtype
        if isinstance(tensor.dtype, int)
        else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    )
    return "i64" if code == onnx.TensorProto.INT64 else BY_ONNX[code].name


def same_recipe(left: Recipe, right: Recipe) -> bool:
    """Whether two recipes are the same text, and so certainly make the same tensor."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Constant) and isinstance(right, Constant):
        return left.value.dtype == right.value.dtype and bool(
            np.array_equal(left.value, right.value)
        )
    mine, others = vars(left), vars(right)
    return all(_same_field(mine[name], others[name]) for name in mine)


def site_of(node: Node) -> str:
    """The site of a source node: its name without the last word (`layers.0.mlp.up.matmul`)."""
    name: str = node.name
    return name.rsplit(".", 1)[0]


def merged_site(sites: Sequence[str]) -> str:
    """One name for what was several: a.q, a.k, a.v -> a.qkv; a.gate, a.up -> a.gate_up."""
    parts = [site.rsplit(".", 1) for site in sites]
    words = [part[-1] for part in parts]
    joined = ("" if all(len(word) == 1 for word in words) else "_").join(words)
    return ".".join([*parts[0][:-1], joined])


def _same_field(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same_field, left, right))
    if hasattr(left, "load") and hasattr(right, "load"):
        return same_recipe(left, right)
    return bool(left == right)
