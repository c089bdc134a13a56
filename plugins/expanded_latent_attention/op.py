"""Causal attention of prompts to the keys and values that latents are expanded to."""

from trtc.plugins.expanded_latent_attention.reference import reference
from trtc.plugins.kv_pool import LATENT_POOL
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

EXPANDED_LATENT_ATTENTION = FusedOp(
    name="expanded_latent_attention",
    summary="out[head] = softmax(q[head] . expanded keys * scale) . expanded values, causal, for "
    "sequences with least_new new tokens or more while there is room, and what it was for others",
    inputs=(
        Parameter("attended", ("M", "num_heads*value_dim"), ("f32", "bf16")),
        Parameter("q", ("M", "num_heads*head_dim"), ("f32", "bf16")),
        LATENT_POOL,
        Parameter("keys", ("num_heads", "rank", "nope"), ("f32", "bf16"), role="weight"),
        Parameter("values", ("num_heads", "value_dim", "rank"), ("f32", "bf16"), role="weight"),
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
    ),
    outputs=(
        Parameter("out", ("M", "num_heads*value_dim"), ("f32", "bf16"), dtype_from="attended"),
    ),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("head_dim", "int"),
        Attribute("scale", "float"),
        # See plugins/latents/expansion.py.
        Attribute("least_new", "int"),
        Attribute("room", "int"),
        Attribute("most_context", "int", default=0),
    ),
    reference=reference,
    # Keys and values are rounded to the activation type once more than in the reference.
    tolerances={"f32": Tolerance(1e-5, 1e-4), "bf16": Tolerance(1 / 64, 1 / 64)},
    in_place={"out": "attended"},
    row_axes=("M", "B", "P", "num_pages"),
)
