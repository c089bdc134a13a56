"""6-bit weights of linears, experts and tables in the order of the CUDA kernels."""

import math

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import Split
from trtc.plugins.layouts import WEIGHTS

_TABLES = {"embedding": ("table",)}


def split_six_bits(rewriter: Rewriter) -> bool:
    """Store every row-major weight of 6 bits in 6 bits; see plugins/six_bits.py.

    Rules, where weight_dtype is i6:
        linear(x, weight i8 [N, K]; row_major)             -> linear(x, u8 [bytes]; split)
        moe(x, _, gate_up [E, 2I, H], down [E, H, I]; ...) -> the same, expert after expert
        embedding(ids, table i8 [V, H])                    -> embedding(ids, u8 [bytes]; split)
    Scales stay row-major. A table that a linear reads as well is stored once.
    """
    changed = False
    for op, names in {**WEIGHTS, **_TABLES}.items():
        for node in rewriter.fused_nodes(op):
            is_row_major = node.attrs.get("layout", "row_major") == "row_major"
            if node.attrs["weight_dtype"] == "i6" and is_row_major:
                for name in names:
                    _split(rewriter, node, name)
                node.attrs["layout"] = "split"
                changed = True
    return changed


def _split(rewriter: Rewriter, node: Node, name: str) -> None:
    weight = input_of(node, name)
    assert weight is not None, f"{node.name} has no {name}"
    size = math.prod(weight.shape) * 6 // 8
    stored = rewriter.derived(f"{weight.name}.split", Split(), (weight,), "u8", (size,))
    rewriter.set_input(node, name, stored)


SPLIT_SIX_BITS = Rewrite("split_six_bits", split_six_bits, requires=frozenset({"merge_linears"}))
