"""Causal grouped-query attention over the paged KV pool, with the quantisation after it."""

from trtc.plugins.kv_pool import POOL
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.paged_attention.reference import reference

PAGED_ATTENTION = FusedOp(
    name="paged_attention",
    summary="out = quantize(softmax(q . K * scale) . V), causal, over each sequence's pages",
    inputs=(
        Parameter("q", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        POOL,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        Parameter("k_scale", (), ("f32",), role="weight", optional=True),
        Parameter("v_scale", (), ("f32",), role="weight", optional=True),
        Parameter("pre_scale", ("num_heads*head_dim",), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
        # An attention sink is one more logit of a head in its softmax, without a value.
        Parameter("sinks", ("num_heads",), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter(
            "out",
            ("M", "num_heads*head_dim"),
            ("f32", "bf16", "f8e4m3", "i8"),
            dtype_from="out_dtype",
        ),
    ),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("num_kv_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("scale", "float"),
        Attribute("window", "int", default=0),
        # Contexts fall into chunks as long as the window, and a token sees those of its own chunk.
        Attribute("chunked", "int", default=0),
        Attribute("softcap", "float", default=0.0),
        Attribute("out_dtype", "enum", choices=("f32", "bf16", "f8e4m3", "i8"), cpp_enum="DType"),
    ),
    reference=reference,
    # Sums run in blocks with a running maximum, in another order than the reference's.
    tolerances={
        "f32": Tolerance(1e-5, 1e-4),
        "bf16": Tolerance(1e-4, 1 / 128),
        "f8e4m3": Tolerance(1 / 512, 1 / 8),
        "i8": Tolerance(1.0, 0.0),
    },
    row_axes=("M", "B", "P", "num_pages"),
)
