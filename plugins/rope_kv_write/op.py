"""Per-head norm, rotary embedding and the KV write, fused in one pass over q, k and v."""

from trtc.plugins.kv_pool import POOL, POOL_OUT
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.rope_kv_write.reference import reference

ROPE_KV_WRITE = FusedOp(
    name="rope_kv_write",
    summary="q_out = rope(norm(q)) * q_scale, or norm(rope(q)); "
    "pool[slots] = (rope(norm(k)) / k_scale, norm(v) / v_scale)",
    inputs=(
        Parameter("q", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        Parameter("k", ("M", "num_kv_heads*head_dim"), ("f32", "bf16")),
        Parameter("v", ("M", "num_kv_heads*head_dim"), ("f32", "bf16")),
        Parameter("positions", ("M",), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("cos", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("sin", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("q_norm", ("head_dim",), ("f32",), role="weight", optional=True),
        Parameter("k_norm", ("head_dim",), ("f32",), role="weight", optional=True),
        Parameter("v_norm", ("head_dim",), ("f32",), role="weight", optional=True),
        Parameter("q_scale", ("S",), ("f32",), role="weight", optional=True),
        Parameter("k_scale", (), ("f32",), role="weight", optional=True),
        Parameter("v_scale", (), ("f32",), role="weight", optional=True),
        POOL,
    ),
    outputs=(
        Parameter("q_out", ("M", "num_heads*head_dim"), ("f32", "bf16"), dtype_from="q"),
        POOL_OUT,
    ),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("num_kv_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("rotary_dim", "int"),
        Attribute("eps", "float", default=0.0),
        # 1: heads of q and k are normalised after they were rotated (Hunyuan).
        Attribute("norm_after", "int", default=0),
    ),
    reference=reference,
    # The norm may round the other way, and the rotation can cancel: ulps of the larger operand.
    tolerances={"f32": Tolerance(1e-5, 1e-5), "bf16": Tolerance(1 / 32, 1 / 64)},
    in_place={"pool_out": "pool"},
    row_axes=("M", "num_pages"),
)
