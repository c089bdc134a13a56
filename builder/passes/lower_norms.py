"""RMSNormalization and LayerNormalization over whole rows as trtc.rms_norm."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, is_weight
from trtc.builder.passes.rewriter import Rewriter


def lower_norms(rewriter: Rewriter) -> bool:
    """Lower norms of the residual stream, and of q and k over all heads.

    Rules, for x [M, K]:
        RMSNormalization(x, w; axis=-1)      -> rms_norm(x, f32(w))
        LayerNormalization(x, w, b; axis=-1) -> rms_norm(x, f32(w), f32(b); centered)
    Norms of single heads have more axes; fuse_rope_kv_write takes those.
    """
    changed = False
    for op in ("RMSNormalization", "LayerNormalization"):
        for node in rewriter.nodes(op):
            x, *weights = node.inputs
            is_of_rows = len(x.shape) == 2 and node.attrs.get("axis", -1) in (-1, 1)
            if not all(map(is_weight, weights)) or not is_of_rows:
                continue
            weight, *bias = (rewriter.as_type(one, "f32") for one in weights)
            rewriter.fused(
                "rms_norm",
                node.name,
                inputs={"x": x, "weight": weight, "bias": bias[0] if bias else None},
                outputs={"out": node.outputs[0]},
                attributes={
                    "eps": node.attrs.get("epsilon", 1e-5),
                    "centered": int(op == "LayerNormalization"),
                    "out_dtype": dtype_of(x),
                },
            )
            changed = True
    return changed


LOWER_NORMS = Rewrite("lower_norms", lower_norms, requires=frozenset({"fuse_rope_kv_write"}))
