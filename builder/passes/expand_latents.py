"""Prompts of latent attention attend to expanded keys and values."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import (
    Node,
    Tensor,
    dtype_of,
    input_of,
    is_fused,
    producer,
    site_of,
)
from trtc.builder.passes.rewriter import Rewriter
from trtc.plugins.latents.expansion import LEAST_NEW, room_for
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import InvariantError

_SHARED = ("pool", "query_start", "context_lens", "page_table")
"""Inputs of both forms."""


def expand_latents(rewriter: Rewriter, least_new: int = LEAST_NEW) -> bool:
    """Add the expanded form behind every absorbed one, for sequences with `least_new` new tokens.

    Rule: head_linear(latent_attention(head_linear(q, keys), ...), values) ->
    expanded_latent_attention(head_linear(latent_attention(..., least_new, room), values), q, keys,
    values, ...), where steps have room for a prompt. Where tokens are selected, most_context keeps
    those sequences absorbed of which a token sees more than its selection holds.
    """
    if rewriter.limits.max_num_tokens < least_new:
        return False
    changed = False
    for node in rewriter.fused_nodes("latent_attention"):
        if not int(node.attrs.get("least_new", 0)):
            _expand(rewriter, node, least_new)
            changed = True
    return changed


def _expand(rewriter: Rewriter, node: Node, least_new: int) -> None:
    queries = producer(_given(node, "q"))
    (values,) = node.outputs[0].outputs
    if queries is None or not is_fused(queries, "head_linear") or values.op != queries.op:
        raise InvariantError("is not between products by head", field=node.name)
    head_dim, heads = int(queries.attrs["in_dim"]), int(node.attrs["num_heads"])
    value_dim, dtype = int(values.attrs["out_dim"]), dtype_of(node.outputs[0])
    limits = rewriter.limits
    token_bytes = DTYPES[dtype].num_bytes(heads * (head_dim + value_dim))
    selected = input_of(node, "selected")
    most = 0 if selected is None else int(selected.shape[1])
    longest = min(limits.max_seq_len, most or limits.max_seq_len)
    choice = {
        "least_new": least_new,
        "room": room_for(token_bytes, longest, limits.max_num_tokens),
        "most_context": most,
    }
    node.attrs.update(choice)
    site, out = site_of(node), values.outputs[0]
    attended = rewriter.variable(f"{site}.absorbed_latent_attention.out", dtype, out.shape)
    rewriter.take_output(values, attended)
    rewriter.fused(
        "expanded_latent_attention",
        f"{site}.expanded_latent_attention",
        {
            "attended": attended,
            "q": _given(queries, "x"),
            "keys": _given(queries, "weight"),
            "values": _given(values, "weight"),
            **{name: _given(node, name) for name in _SHARED},
        },
        {"out": out},
        {
            "num_heads": heads,
            "head_dim": head_dim,
            "scale": float(node.attrs["scale"]),
            **choice,
        },
    )


def _given(node: Node, parameter: str) -> Tensor:
    tensor = input_of(node, parameter)
    assert tensor is not None
    return tensor


EXPAND_LATENTS = Rewrite("expand_latents", expand_latents)
