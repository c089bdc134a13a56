"""Lowers additions that no pass has fused to trtc.add."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, is_weight
from trtc.builder.passes.rewriter import Rewriter


def lower_add(rewriter: Rewriter) -> bool:
    """Lower what is left.

    Rules, for computed tensors of one shape [M, K] and type:
        Mul(Add(x, y), c) -> add(x, y, c), for a weight c of one element, and a sum that nothing
                             else reads
        Add(x, y)         -> add(x, y)
    """
    changed = False
    for node in rewriter.nodes("Add"):
        x, y = node.inputs
        if is_weight(x) or is_weight(y) or len(x.shape) != 2:
            continue
        if list(x.shape) != list(y.shape) or dtype_of(x) != dtype_of(y):
            continue
        last, factor = _scaled(rewriter, node)
        rewriter.fused(
            "add",
            node.name,
            inputs={"x": x, "y": y, "factor": factor},
            outputs={"out": last.outputs[0]},
            attributes={},
        )
        changed = True
    return changed


def _scaled(rewriter: Rewriter, add: Node) -> tuple[Node, Tensor | None]:
    """What multiplies the sum, and by what; the addition itself if nothing does."""
    multiply = rewriter.sole_consumer(add.outputs[0], "Mul")
    if multiply is not None:
        for factor in multiply.inputs:
            if is_weight(factor) and list(factor.shape) == []:
                return multiply, rewriter.as_type(factor, "f32")
    return add, None


LOWER_ADD = Rewrite("lower_add", lower_add, requires=frozenset({"lower_linears", "fuse_add_norm"}))
