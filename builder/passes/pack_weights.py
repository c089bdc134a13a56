"""Weights of linears and experts in the byte order of the CPU kernels."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.transforms import Pack, PackColumns
from trtc.plugins.layouts import WEIGHTS, packed_bytes


def pack_weights(rewriter: Rewriter) -> bool:
    """Pack every row-major weight; see plugins/layouts.py.

    Rules:
        linear(x, weight [N, K]; row_major)                   -> linear(x, u8 [bytes]; packed)
        moe(x, _, gate_up [E, 2I, H], down [E, H, I]; ...)    -> the same, expert after expert
        embedding(ids, an i8 weight of whole blocks)          -> embedding(ids, u8 [V, H])
    Scales and zero points of groups go with their panels.

    Other embedding tables stay row-major for the lookup, those too that are the lm_head as well.
    """
    changed = False
    for op, names in WEIGHTS.items():
        for node in rewriter.fused_nodes(op):
            if node.attrs["layout"] == "row_major":
                for name in names:
                    _pack(rewriter, node, name)
                    _pack_columns(rewriter, node, f"{name}_scale")
                    _pack_columns(rewriter, node, f"{name}_zero")
                node.attrs["layout"] = "packed"
                changed = True
    return changed


def _pack(rewriter: Rewriter, node: Node, name: str) -> None:
    weight = input_of(node, name)
    assert weight is not None, f"{node.name} has no {name}"
    dtype = node.attrs["weight_dtype"]
    *experts, num_columns, depth = weight.shape
    size = packed_bytes(num_columns, depth, dtype) * (experts[0] if experts else 1)
    lookups = _lookups(weight) if dtype == "i8" and size == num_columns * depth else []
    shape = (num_columns, depth) if lookups else (size,)
    function = Pack(dtype, keeps_shape=bool(lookups))
    packed = rewriter.derived(f"{weight.name}.packed", function, (weight,), "u8", shape)
    rewriter.set_input(node, name, packed)
    for lookup in lookups:
        rewriter.set_input(lookup, "table", packed)
        _pack_columns(rewriter, lookup, "table_scale")


def _lookups(weight: Tensor) -> list[Node]:
    return [node for node in weight.outputs if node.op == "embedding"]


def _pack_columns(rewriter: Rewriter, node: Node, name: str) -> None:
    values = input_of(node, name)
    if values is None or values.shape[-1] == 1:  # one a column lies the same either way
        return
    packed = rewriter.derived(
        f"{values.name}.packed", PackColumns(), (values,), dtype_of(values), tuple(values.shape)
    )
    rewriter.set_input(node, name, packed)


PACK_WEIGHTS = Rewrite("pack_weights", pack_weights, requires=frozenset({"merge_linears"}))
