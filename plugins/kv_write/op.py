"""Writes K and V to the paged pool; the form of the source graph, which rope_kv_write fuses."""

from trtc.plugins.kv_pool import POOL, POOL_DTYPES, POOL_OUT
from trtc.plugins.kv_write.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

KV_WRITE = FusedOp(
    name="kv_write",
    summary="pool[slots] = (k / k_scale, v / v_scale)",
    inputs=(
        Parameter("k", ("M", "num_kv_heads*head_dim"), ("f32", "bf16")),
        Parameter("v", ("M", "num_kv_heads*head_dim"), ("f32", "bf16")),
        POOL,
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("k_scale", (), ("f32",), role="weight", optional=True),
        Parameter("v_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(POOL_OUT,),
    attributes=(Attribute("num_kv_heads", "int"), Attribute("head_dim", "int")),
    reference=reference,
    tolerances={name: Tolerance(0.0, 0.0) for name in POOL_DTYPES},
    in_place={"pool_out": "pool"},
    row_axes=("M", "num_pages"),
)
