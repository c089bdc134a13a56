"""RMSNormalization over whole rows as trtc.rms_norm."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, is_weight
from trtc.builder.passes.rewriter import Rewriter


def lower_norms(rewriter: Rewriter) -> bool:
    """Lower norms of the residual stream.

    Rule: RMSNormalization(x, w; axis=-1) -> rms_norm(x, f32(w)), for x [M, K]. Norms of single
    heads have more axes; fuse_rope_kv_write takes those.
    """
    changed = False
    for node in rewriter.nodes("RMSNormalization"):
        x, weight = node.inputs
        if not is_weight(weight) or len(x.shape) != 2 or node.attrs.get("axis", -1) not in (-1, 1):
            continue
        rewriter.fused(
            "rms_norm",
            node.name,
            inputs={"x": x, "weight": rewriter.as_type(weight, "f32")},
            outputs={"out": node.outputs[0]},
            attributes={"eps": node.attrs.get("epsilon", 1e-5), "out_dtype": dtype_of(x)},
        )
        changed = True
    return changed


LOWER_NORMS = Rewrite("lower_norms", lower_norms, requires=frozenset({"fuse_rope_kv_write"}))
