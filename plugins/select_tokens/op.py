"""The tokens that a sparse attention reads: those whose keys score highest."""

from trtc.plugins.kv_pool import INDEX_POOL
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.select_tokens.reference import reference

SELECT_TOKENS = FusedOp(
    name="select_tokens",
    summary="selected = slots of the top_k tokens by sum over heads of weight * relu(q . key), of "
    "those that a token sees, by position; all while these are no more, and -1 behind them",
    inputs=(
        Parameter("q", ("M", "num_heads*width"), ("f32", "bf16")),
        Parameter("weights", ("M", "num_heads"), ("f32",)),
        INDEX_POOL,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
    ),
    outputs=(Parameter("selected", ("M", "top_k"), ("i32",)),),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("top_k", "int"),
        # The longest context, whose scores kernels have room for.
        Attribute("max_context", "int"),
    ),
    reference=reference,
    # Of scores that are nearer than their rounding either may be the larger.
    tolerances={"i32": Tolerance(0.0, 0.0)},
    row_axes=("M", "B", "P", "num_pages"),
)
