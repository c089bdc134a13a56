"""Split-KV attention of a step; attention_combine combines the partial results."""

from trtc.plugins.attention_split.reference import reference
from trtc.plugins.kv_pool import POOL
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

ATTENTION_SPLIT = FusedOp(
    name="attention_split",
    summary="paged_attention, but for sequences with one new token over a context of splits: sums "
    "over each split in partial and stats, and nothing in out",
    inputs=(
        Parameter("q", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        POOL,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        Parameter("k_scale", (), ("f32",), role="weight", optional=True),
        Parameter("v_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "num_heads*head_dim"), ("f32", "bf16"), dtype_from="out_dtype"),
        # [B, splits, num_heads, head_dim]: values weighted by 2^(score - largest), summed.
        Parameter("partial", ("B", "splits*num_heads*head_dim"), ("f32",)),
        # [B, splits, num_heads, 2]: the largest score times log2(e), and the sum of the weights.
        Parameter("stats", ("B", "2*splits*num_heads"), ("f32",)),
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
        Attribute("splits", "int"),
        Attribute("out_dtype", "enum", choices=("f32", "bf16"), cpp_enum="DType"),
    ),
    reference=reference,
    # As paged_attention's: sums run in blocks with a running maximum.
    tolerances={"f32": Tolerance(1e-5, 1e-4), "bf16": Tolerance(1e-4, 1 / 128)},
    row_axes=("M", "B", "P", "num_pages"),
)
