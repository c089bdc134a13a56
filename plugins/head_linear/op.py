"""Batched GEMM with one matrix per head. Latent attention multiplies queries and results by such
matrices instead of computing keys and values (absorbed form)."""

from trtc.plugins.head_linear.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

HEAD_LINEAR = FusedOp(
    name="head_linear",
    summary="out[head] = (weight[head] @ x[head][:K], x[head][K:])",
    inputs=(
        Parameter("x", ("M", "num_heads*in_dim"), ("f32", "bf16")),
        Parameter("weight", ("num_heads", "N", "K"), ("f32", "bf16"), role="weight"),
    ),
    outputs=(Parameter("out", ("M", "num_heads*out_dim"), ("f32", "bf16"), dtype_from="x"),),
    # in_dim - K = out_dim - N: what passes unchanged.
    attributes=(Attribute("in_dim", "int"), Attribute("out_dim", "int")),
    reference=reference,
    tolerances={"f32": Tolerance(1e-5, 1e-4), "bf16": Tolerance(1 / 128, 1 / 64)},
)
