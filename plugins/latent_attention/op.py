"""Causal attention of many heads to one latent a token, over the paged pool."""

from trtc.plugins.kv_pool import LATENT_POOL
from trtc.plugins.latent_attention.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

LATENT_ATTENTION = FusedOp(
    name="latent_attention",
    summary="out[head] = softmax(q[head] . latents * scale) . latents[:rank], causal; for a token "
    "that sees more than top_k, of those selected alone",
    inputs=(
        Parameter("q", ("M", "num_heads*width"), ("f32", "bf16")),
        LATENT_POOL,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        # As select_tokens gives it.
        Parameter("selected", ("M", "top_k"), ("i32",), optional=True),
    ),
    outputs=(Parameter("out", ("M", "num_heads*rank"), ("f32", "bf16"), dtype_from="q"),),
    attributes=(
        Attribute("num_heads", "int"),
        Attribute("rank", "int"),
        Attribute("scale", "float"),
        # Sequences that expanded_latent_attention takes instead, whose rows are not written.
        Attribute("least_new", "int", default=0),
        Attribute("room", "int", default=0),
        Attribute("most_context", "int", default=0),
    ),
    reference=reference,
    # Sums run in blocks with a running maximum, in another order than the reference's.
    tolerances={"f32": Tolerance(1e-5, 1e-4), "bf16": Tolerance(1e-4, 1 / 128)},
    row_axes=("M", "B", "P", "num_pages"),
)
