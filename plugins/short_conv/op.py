"""A gated, causal, depthwise convolution of a few taps, whose state is its latest inputs."""

from trtc.plugins.kv_pool import STATE, STATE_OUT
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.short_conv.reference import reference

SHORT_CONV = FusedOp(
    name="short_conv",
    summary="b, c, x = split(gated); out = c * (conv(b * x) + bias), over each sequence",
    inputs=(
        Parameter("gated", ("M", "3*channels"), ("f32", "bf16")),
        STATE,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("weight", ("columns+1", "channels"), ("f32",), role="weight"),
        Parameter("bias", ("channels",), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "channels"), ("f32", "bf16"), dtype_from="gated"),
        STATE_OUT,
    ),
    attributes=(Attribute("page_size", "int"),),
    reference=reference,
    # A sum of a few products may round the other way, and so may its product with c.
    tolerances={"f32": Tolerance(1e-6, 1e-5), "bf16": Tolerance(1 / 64, 1 / 64)},
    in_place={"state_out": "state"},
    row_axes=("M", "B", "P", "num_pages"),
)
