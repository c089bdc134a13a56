"""Combines the partial results of attention_split."""

from trtc.plugins.attention_combine.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

ATTENTION_COMBINE = FusedOp(
    name="attention_combine",
    summary="out = the softmax over all splits of a row, or the row itself if it was one split",
    inputs=(
        Parameter("rows", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        Parameter("partial", ("B", "splits*num_heads*head_dim"), ("f32",)),
        Parameter("stats", ("B", "2*splits*num_heads"), ("f32",)),
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
    ),
    outputs=(Parameter("out", ("M", "num_heads*head_dim"), ("f32", "bf16"), dtype_from="rows"),),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("window", "int", default=0),
        # Contexts fall into chunks as long as the window, and a token sees those of its own chunk.
        Attribute("chunked", "int", default=0),
        Attribute("splits", "int"),
    ),
    reference=reference,
    tolerances={"f32": Tolerance(1e-5, 1e-4), "bf16": Tolerance(1e-4, 1 / 128)},
    row_axes=("M", "B"),
)
