"""K and V into the paged pool, as the source graph says it; rope_kv_write fuses it."""

from trtc.plugins.kv_write.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

POOL_AXES = ("num_pages", "2", "page_size", "num_kv_heads", "head_dim")
POOL_DTYPES = ("f32", "bf16", "f8e4m3")

KV_WRITE = FusedOp(
    name="kv_write",
    summary="pool[slots] = (k / k_scale, v / v_scale)",
    inputs=(
        Parameter("k", ("M", "num_kv_heads*head_dim"), ("f32", "bf16")),
        Parameter("v", ("M", "num_kv_heads*head_dim"), ("f32", "bf16")),
        Parameter("pool", POOL_AXES, POOL_DTYPES, role="pool"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("k_scale", (), ("f32",), role="weight", optional=True),
        Parameter("v_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("pool_out", POOL_AXES, POOL_DTYPES, role="pool"),),
    attributes=(Attribute("num_kv_heads", "int"), Attribute("head_dim", "int")),
    reference=reference,
    tolerances={name: Tolerance(0.0, 0.0) for name in POOL_DTYPES},
    in_place={"pool_out": "pool"},
    row_axes=("M", "num_pages"),
)
