"""Weights of linears and experts in the byte order of the CPU kernels."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, has_powers, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import E8m0Values, Pack, PackColumns, PackPlanes
from trtc.plugins.layouts import BLOCK_DEPTH, WEIGHTS, packed_bytes

_LOOKED_UP = ("i8", "i6", "iq4")
"""Types of packed weights that lookups read too."""


def pack_weights(rewriter: Rewriter) -> bool:
    """Pack every row-major weight; see plugins/layouts.py.

    Rules:
        linear(x, weight [N, K]; row_major)                   -> linear(x, u8 [bytes]; packed)
        the same that gives the graph's logits from i8 groups -> linear(x, u8 [bytes]; planes)
        moe(x, _, gate_up [E, 2I, H], down [E, H, I]; ...)    -> the same, expert after expert
        embedding(ids, an i8, i6 or iq4 weight of such a linear)
                                                              -> embedding(ids, u8 [bytes]; ...)
        embedding(ids, an i6 table of its own)                -> embedding(ids, u8 [bytes]; packed)
    Scales and zero points of groups go with their panels; E8M0 scales of experts become f32, in
    which kernels multiply sums.

    Other embedding tables stay row-major for the lookup, those too that are the lm_head as well.
    """
    changed = False
    for op, names in WEIGHTS.items():
        for node in rewriter.fused_nodes(op):
            if node.attrs["layout"] == "row_major":
                layout = "planes" if _is_searched(rewriter, node) else "packed"
                for name in names:
                    _pack(rewriter, node, name, layout)
                    _pack_columns(rewriter, node, f"{name}_scale")
                    _pack_columns(rewriter, node, f"{name}_zero")
                node.attrs["layout"] = layout
                changed = True
    for lookup in rewriter.fused_nodes("embedding"):
        if lookup.attrs["weight_dtype"] == "i6" and lookup.attrs.get("layout") != "packed":
            _pack(rewriter, lookup, "table", "packed")
            _pack_columns(rewriter, lookup, "table_scale")
            lookup.attrs["layout"] = "packed"
            changed = True
    return changed


def _is_searched(rewriter: Rewriter, node: Node) -> bool:
    """Whether steps may ask for the largest results only, in a layout that takes the weight."""
    if node.op != "linear" or not rewriter.is_output(node.outputs[0]):
        return False
    weight, attrs = input_of(node, "weight"), node.attrs
    assert weight is not None, f"{node.name} has no weight"
    if attrs["weight_dtype"] != "i8" or attrs["activation"] != "dynamic_i8":
        return False
    return bool(attrs["group_size"]) and weight.shape[1] % BLOCK_DEPTH["i4"] == 0


def _pack(rewriter: Rewriter, node: Node, name: str, layout: str) -> None:
    weight = input_of(node, name)
    assert weight is not None, f"{node.name} has no {name}"
    dtype = node.attrs["weight_dtype"]
    *experts, num_columns, depth = weight.shape
    size = packed_bytes(num_columns, depth, dtype) * (experts[0] if experts else 1)
    is_shared = node.op == "linear" and dtype in _LOOKED_UP
    lookups = _lookups(weight) if is_shared else []
    function = PackPlanes() if layout == "planes" else Pack(dtype)
    packed = rewriter.derived(f"{weight.name}.packed", function, (weight,), "u8", (size,))
    rewriter.set_input(node, name, packed)
    for lookup in lookups:
        rewriter.set_input(lookup, "table", packed)
        lookup.attrs["layout"] = layout
        _pack_columns(rewriter, lookup, "table_scale")


def _lookups(weight: Tensor) -> list[Node]:
    return [node for node in weight.outputs if node.op == "embedding"]


def _pack_columns(rewriter: Rewriter, node: Node, name: str) -> None:
    values = input_of(node, name)
    if values is None or values.shape[-1] == 1:  # one a column lies the same either way
        return
    dtype, shape = dtype_of(values), tuple(values.shape)
    if node.op == "moe" and name.endswith("_scale") and has_powers(node):
        dtype = "f32"
        values = rewriter.derived(f"{values.name}.f32", E8m0Values(), (values,), dtype, shape)
    packed = rewriter.derived(f"{values.name}.packed", PackColumns(), (values,), dtype, shape)
    rewriter.set_input(node, name, packed)


PACK_WEIGHTS = Rewrite("pack_weights", pack_weights, requires=frozenset({"merge_linears"}))
