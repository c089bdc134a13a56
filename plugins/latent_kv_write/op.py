"""Norm of the latent, rotary embedding of queries and keys, and the pool write, in one pass."""

from trtc.plugins.kv_pool import LATENT_POOL, LATENT_POOL_OUT
from trtc.plugins.latent_kv_write.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

LATENT_KV_WRITE = FusedOp(
    name="latent_kv_write",
    summary="q_out = (q[:nope], rope(q[nope:])) * q_scale; pool[slots] = (norm(c), rope(k))",
    inputs=(
        Parameter("q", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        Parameter("kv", ("M", "width"), ("f32", "bf16")),
        Parameter("positions", ("M",), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("cos", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("sin", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("norm", ("rank",), ("f32",), role="weight"),
        LATENT_POOL,
        Parameter("q_scale", ("S",), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("q_out", ("M", "num_heads*head_dim"), ("f32", "bf16"), dtype_from="q"),
        LATENT_POOL_OUT,
    ),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("eps", "float"),
    ),
    reference=reference,
    # The norm may round the other way, and the rotation can cancel: ulps of the larger operand.
    tolerances={"f32": Tolerance(1e-5, 1e-5), "bf16": Tolerance(1 / 32, 1 / 64)},
    in_place={"pool_out": "pool"},
    row_axes=("M", "num_pages"),
)
