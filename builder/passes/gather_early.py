"""The last layer's MLP for the rows that need logits, instead of for all."""

from trtc.builder.module import TRTC_DOMAIN
from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, is_weight, producer
from trtc.builder.passes.rewriter import Rewriter

_ROWWISE = ("linear", "rms_norm", "swiglu", "quantize", "gather_columns", "add", "moe")
"""Operators whose result in a row depends on that row alone."""


def gather_early(rewriter: Rewriter) -> bool:
    """Choose the logit rows before everything that works row by row.

    Rule: gather_rows(f(a, b, ...), rows) -> f(gather_rows(a, rows), gather_rows(b, rows), ...)
    for the largest f made of row-wise operators and Splits whose results nothing else reads.

    In a decoder f is all that follows the last attention; a prompt needs its last row only, and
    chunks before the last one none at all.
    """
    changed = False
    for gather in list(rewriter.fused_nodes("gather_rows")):
        if rewriter.is_output(gather.outputs[0]):
            continue
        cone = _cone(rewriter, gather)
        sources = _sources(cone)
        if cone and all(dtype_of(tensor) in ("f32", "bf16") for tensor in sources):
            _hoist(rewriter, gather, cone, sources)
            changed = True
    return changed


def _cone(rewriter: Rewriter, gather: Node) -> list[Node]:
    """The row-wise nodes that serve `gather` alone, each before those it reads."""
    cone: list[Node] = []
    members = {id(gather)}
    pending = [gather.inputs[0]]
    while pending:
        node = producer(pending.pop(0))
        if node is None or id(node) in members or not _is_rowwise(node):
            continue
        readers = [reader for tensor in node.outputs for reader in tensor.outputs]
        if any(id(reader) not in members for reader in readers):
            continue
        if any(rewriter.is_output(tensor) for tensor in node.outputs):
            continue
        members.add(id(node))
        cone.append(node)
        # A source may have been rejected before its last reader was added: check it again.
        pending += _activations(node)
    return cone


def _is_rowwise(node: Node) -> bool:
    if node.domain == TRTC_DOMAIN:
        return node.op in _ROWWISE
    return bool(node.op == "Split" and node.attrs.get("axis", 0) in (1, -1))


def _activations(node: Node) -> list[Tensor]:
    return [tensor for tensor in node.inputs if not tensor.is_empty() and not is_weight(tensor)]


def _sources(cone: list[Node]) -> list[Tensor]:
    """What the cone reads and does not make."""
    made = {tensor.name for node in cone for tensor in node.outputs}
    found = {tensor.name: tensor for node in cone for tensor in _activations(node)}
    return [tensor for name, tensor in found.items() if name not in made]


def _hoist(rewriter: Rewriter, gather: Node, cone: list[Node], sources: list[Tensor]) -> None:
    whole, rows = gather.inputs
    for tensor in sources:
        site = f"{tensor.name.removesuffix('.out')}.logit_rows"
        chosen = rewriter.variable(f"{site}.out", dtype_of(tensor), tensor.shape)
        rewriter.fused("gather_rows", site, {"x": tensor, "rows": rows}, {"out": chosen}, {})
        for node in cone:
            node.inputs = [chosen if given is tensor else given for given in node.inputs]
    rewriter.replace_uses(gather.outputs[0], whole)
    for node in reversed(cone):
        if node.domain == TRTC_DOMAIN:
            rewriter.retype(node)
        else:
            for part in node.outputs:
                part.shape = [node.inputs[0].shape[0], part.shape[1]]


GATHER_EARLY = Rewrite(
    "gather_early",
    gather_early,
    requires=frozenset(
        {"merge_linears", "lower_gather_rows", "lower_swiglu", "fuse_add_norm", "lower_add"}
    ),
)
