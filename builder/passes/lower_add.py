"""Lowers additions that no pass has fused to trtc.add."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, is_weight
from trtc.builder.passes.rewriter import Rewriter


def lower_add(rewriter: Rewriter) -> bool:
    """Lower what is left.

    Rule: Add(x, y) -> add(x, y), for computed tensors of one shape [M, K] and type.
    """
    changed = False
    for node in rewriter.nodes("Add"):
        x, y = node.inputs
        if is_weight(x) or is_weight(y) or len(x.shape) != 2:
            continue
        if list(x.shape) != list(y.shape) or dtype_of(x) != dtype_of(y):
            continue
        rewriter.fused(
            "add",
            node.name,
            inputs={"x": x, "y": y},
            outputs={"out": node.outputs[0]},
            attributes={},
        )
        changed = True
    return changed


LOWER_ADD = Rewrite("lower_add", lower_add, requires=frozenset({"lower_linears", "fuse_add_norm"}))
