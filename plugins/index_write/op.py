"""LayerNorm of the keys by which tokens are selected, rotary embedding of these and of their
queries, and the pool write, in one pass."""

from trtc.plugins.index_write.reference import reference
from trtc.plugins.kv_pool import INDEX_POOL, INDEX_POOL_OUT
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

INDEX_WRITE = FusedOp(
    name="index_write",
    summary="q_out = rope(q); pool[slots] = rope(layer_norm(k))",
    inputs=(
        Parameter("q", ("M", "num_heads*width"), ("f32", "bf16")),
        Parameter("k", ("M", "width"), ("f32", "bf16")),
        Parameter("positions", ("M",), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("cos", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("sin", ("S", "rotary_half"), ("f32",), role="weight"),
        Parameter("norm", ("width",), ("f32",), role="weight"),
        Parameter("bias", ("width",), ("f32",), role="weight"),
        INDEX_POOL,
    ),
    outputs=(
        Parameter("q_out", ("M", "num_heads*width"), ("f32", "bf16"), dtype_from="q"),
        INDEX_POOL_OUT,
    ),
    attributes=(Attribute("num_heads", "int"), Attribute("eps", "float")),
    reference=reference,
    # The norm may round the other way, and the rotation can cancel: ulps of the larger operand.
    tolerances={"f32": Tolerance(1e-5, 1e-5), "bf16": Tolerance(1 / 32, 1 / 64)},
    in_place={"pool_out": "pool"},
    row_axes=("M", "num_pages"),
)
