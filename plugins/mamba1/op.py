"""The selective scan of Mamba, whose every channel has a state of its own."""

from trtc.plugins.kv_pool import SCAN_STATE, SCAN_STATE_OUT
from trtc.plugins.mamba1.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

MAMBA1 = FusedOp(
    name="mamba1",
    summary="out = scan(x, softplus(dt + dt_bias), b, c) * silu(z)",
    inputs=(
        Parameter("x", ("M", "channels"), ("f32", "bf16")),
        Parameter("z", ("M", "channels"), ("f32", "bf16")),
        Parameter("dt", ("M", "channels"), ("f32", "bf16")),
        Parameter("b", ("M", "state_size"), ("f32", "bf16")),
        Parameter("c", ("M", "state_size"), ("f32", "bf16")),
        SCAN_STATE,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("rate", ("state_size", "channels"), ("f32",), role="weight"),
        Parameter("dt_bias", ("channels",), ("f32",), role="weight"),
        Parameter("skip", ("channels",), ("f32",), role="weight"),
    ),
    outputs=(
        Parameter("out", ("M", "channels"), ("f32", "bf16"), dtype_from="x"),
        SCAN_STATE_OUT,
    ),
    attributes=(
        Attribute("channels", "int"),
        Attribute("state_size", "int"),
        Attribute("page_size", "int"),
    ),
    reference=reference,
    # Sums over state_size, in any order, of a state that remembers earlier ones.
    tolerances={"f32": Tolerance(2e-5, 1e-4), "bf16": Tolerance(1 / 128, 1 / 64)},
    in_place={"state_out": "state"},
    row_axes=("M", "B", "P", "num_pages"),
)
