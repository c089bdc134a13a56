"""Merges equal quantisations of one tensor."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, input_of
from trtc.builder.passes.rewriter import Rewriter


def share_quantize(rewriter: Rewriter) -> bool:
    """Let the readers of equal trtc.quantize nodes read the first.

    Rule: quantize(x, p, s), quantize(x, p', s') -> one, where p = p', s = s' and the attributes
    are equal. Weights count as equal only when their inline bytes or their recipes are.
    """
    changed = False
    kept: dict[str, list[Node]] = {}
    for node in rewriter.fused_nodes("quantize"):
        others = kept.setdefault(node.inputs[0].name, [])
        twin = next((other for other in others if _equal(rewriter, node, other)), None)
        if twin is None or rewriter.is_output(node.outputs[0]):
            others.append(node)
        else:
            for own, shared in zip(list(node.outputs), list(twin.outputs), strict=True):
                rewriter.replace_uses(own, shared)
            changed = True
    return changed


def _equal(rewriter: Rewriter, left: Node, right: Node) -> bool:
    return left.attrs == right.attrs and all(
        rewriter.same_weight(input_of(left, name), input_of(right, name))
        for name in ("pre_scale", "out_scale")
    )


SHARE_QUANTIZE = Rewrite("share_quantize", share_quantize, requires=frozenset({"lower_linears"}))
