"""Per-head norm and rotary embedding of queries whose keys another layer has written."""

from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.rope.reference import reference

ROPE = FusedOp(
    name="rope",
    summary="out = rope(norm(q))",
    inputs=(
        Parameter("q", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        Parameter("positions", ("M",), ("i32",), role="step"),
        Parameter("cos", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("sin", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("q_norm", ("head_dim",), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("out", ("M", "num_heads*head_dim"), ("f32", "bf16"), dtype_from="q"),),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("rotary_dim", "int"),
        Attribute("eps", "float", default=0.0),
        # 1: heads of q and k are normalised after they were rotated (Hunyuan).
        Attribute("norm_after", "int", default=0),
    ),
    reference=reference,
    # As of rope_kv_write.
    tolerances={"f32": Tolerance(1e-5, 1e-5), "bf16": Tolerance(1 / 32, 1 / 64)},
)
