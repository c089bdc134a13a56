"""Fuses residual additions into the norm that reads their sum."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, dtype_of, input_of, is_weight, producer
from trtc.builder.passes.rewriter import Rewriter


def fuse_add_norm(rewriter: Rewriter) -> bool:
    """Let the norm add the two summands of its input.

    Rule: rms_norm(Add(a, b)) -> rms_norm(a, residual=b), which also gives the sum as `total` when
    others read it. Where linears absorb residuals (fuse_residual, on one rank) only sums of
    post norms (Gemma 2) are left.
    """
    changed = False
    for norm in rewriter.fused_nodes("rms_norm"):
        add = producer(norm.inputs[0], "Add")
        if add is not None and input_of(norm, "residual") is None and _is_sum_of_rows(add):
            _fuse(rewriter, norm, add)
            changed = True
    return changed


def _is_sum_of_rows(add: Node) -> bool:
    left, right = add.inputs
    return (
        not is_weight(left)
        and not is_weight(right)
        and list(left.shape) == list(right.shape)
        and dtype_of(left) == dtype_of(right)
    )


def _fuse(rewriter: Rewriter, norm: Node, add: Node) -> None:
    total = add.outputs[0]
    left, right = add.inputs
    inputs = {name: input_of(norm, name) for name in ("weight", "bias", "pre_scale", "out_scale")}
    outputs = {"out": norm.outputs[0]}
    if rewriter.sole_consumer(total) is None:
        outputs["total"] = total
    rewriter.fused(
        "rms_norm",
        norm.name,
        inputs={"x": left, "residual": right, **inputs},
        outputs=outputs,
        attributes=norm.attrs,
    )


FUSE_ADD_NORM = Rewrite("fuse_add_norm", fuse_add_norm, requires=frozenset({"lower_norms"}))
