"""Fuses a shared expert's gate, and its sum with the routed ones, into trtc.moe."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of, is_fused, producer
from trtc.builder.passes.rewriter import Rewriter


def fuse_shared_expert(rewriter: Rewriter) -> bool:
    """Weigh and add a shared expert where the routed ones are added up, in f32.

    Rules:
        Add(moe(x), Mul(y, Sigmoid(g))) -> moe(x, shared=y, shared_gate=g)
        Add(moe(x), linear(...))        -> moe(x, shared=linear(...))
    for g [M, 1] f32, rounded or not after the Sigmoid,
    where nothing else reads the two summands. The residual is fuse_residual's.
    """
    changed = False
    for add in rewriter.nodes("Add"):
        left, right = add.inputs
        for routed, shared in ((left, right), (right, left)):
            moe = producer(routed)
            found = _gated(shared) or _plain(shared)
            if found is not None and _fits(rewriter, moe, routed, shared):
                for name, tensor in found.items():
                    rewriter.set_input(moe, name, tensor)
                rewriter.take_output(moe, add.outputs[0])
                changed = True
                break
    return changed


def _fits(rewriter: Rewriter, moe: Node | None, routed: Tensor, shared: Tensor) -> bool:
    return (
        is_fused(moe, "moe")
        and rewriter.sole_consumer(routed) is not None
        and rewriter.sole_consumer(shared) is not None
        and input_of(moe, "shared") is None
        and input_of(moe, "residual") is None
    )


def _plain(shared: Tensor) -> dict[str, Tensor] | None:
    return {"shared": shared} if is_fused(producer(shared), "linear") else None


def _gated(shared: Tensor) -> dict[str, Tensor] | None:
    """y and g of Mul(y, Sigmoid(g))."""
    multiply = producer(shared, "Mul")
    if multiply is None:
        return None
    for y, share in (multiply.inputs, reversed(multiply.inputs)):
        rounded = producer(share, "Cast")
        sigmoid = producer(share if rounded is None else rounded.inputs[0], "Sigmoid")
        if sigmoid is None or list(share.shape) != [y.shape[0], 1]:
            continue
        if dtype_of(sigmoid.inputs[0]) == "f32":
            return {"shared": y, "shared_gate": sigmoid.inputs[0]}
    return None


FUSE_SHARED_EXPERT = Rewrite(
    "fuse_shared_expert", fuse_shared_expert, requires=frozenset({"lower_linears"})
)
