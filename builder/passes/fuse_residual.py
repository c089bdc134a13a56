"""Fuses residual additions into the epilogue of the preceding linear or experts."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import (
    Node,
    Tensor,
    dtype_of,
    input_of,
    is_fused,
    is_weight,
    producer,
)
from trtc.builder.passes.rewriter import Rewriter


def fuse_residual(rewriter: Rewriter) -> bool:
    """Add the residual where the sum is still in f32.

    Rules:
        Add(linear(x), r) -> linear(x, residual=r)
        Add(moe(x), r)    -> moe(x, residual=r)
    for r of the output's shape and type, where nothing else reads the product. Of two candidates
    the later one is taken: the other is ready before it.
    """
    changed = False
    for add in rewriter.nodes("Add"):
        left, right = add.inputs
        for product, residual in ((right, left), (left, right)):
            node = producer(product)
            if node is not None and _fits(rewriter, node, product, residual):
                rewriter.set_input(node, "residual", residual)
                rewriter.take_output(node, add.outputs[0])
                changed = True
                break
    return changed


def _fits(rewriter: Rewriter, node: Node, product: Tensor, residual: Tensor) -> bool:
    return (
        (is_fused(node, "linear") or is_fused(node, "moe"))
        and rewriter.sole_consumer(product) is not None
        and input_of(node, "residual") is None
        and not is_weight(residual)
        and list(residual.shape) == list(product.shape)
        and dtype_of(residual) == dtype_of(product)
    )


FUSE_RESIDUAL = Rewrite("fuse_residual", fuse_residual, requires=frozenset({"merge_linears"}))
