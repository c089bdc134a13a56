"""Splits attention over long contexts into two plugins: attention_split and attention_combine."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.plugins.attention.split_kv import TENSORRT

LEAST_SPLITS = 4
"""Of the longest context: a second launch a layer is not worth less. With splits of 256 keys,
engines for 769 tokens and more are split, but not layers whose window is shorter than that."""
_SHARED = ("num_heads", "head_dim", "window", "chunked", "splits")
"""Attributes of attention_combine."""


def split_attention(rewriter: Rewriter) -> bool:
    """Split every attention over long contexts.

    Rule: paged_attention(q, pool, ...) ->
    attention_combine(attention_split(q, pool, ...) -> rows, partial, stats; ...), where the
    longest sequence, or what a window shows of it, falls into LEAST_SPLITS splits or more.
    """
    changed = False
    for node in rewriter.fused_nodes("paged_attention"):
        splits = TENSORRT.most(rewriter.limits.max_seq_len, int(node.attrs.get("window", 0)))
        if splits >= LEAST_SPLITS:
            _split(rewriter, node, splits)
            changed = True
    return changed


def _split(rewriter: Rewriter, node: Node, splits: int) -> None:
    assert input_of(node, "pre_scale") is None and input_of(node, "out_scale") is None
    site, attributes = node.name.rsplit(".", 1)[0], {**node.attrs, "splits": splits}
    inputs = {
        name: input_of(node, name)
        for name in ("q", "pool", "query_start", "context_lens", "page_table", "k_scale", "v_scale")
    }
    rows, partial, stats = (
        rewriter.variable(f"{site}.attention_split.{name}", dtype, ())
        for name, dtype in (
            ("out", dtype_of(node.outputs[0])),
            ("partial", "f32"),
            ("stats", "f32"),
        )
    )
    rewriter.fused(
        "attention_split",
        f"{site}.attention_split",
        inputs,
        {"out": rows, "partial": partial, "stats": stats},
        attributes,
    )
    rewriter.fused(
        "attention_combine",
        f"{site}.attention_combine",
        {
            "rows": rows,
            "partial": partial,
            "stats": stats,
            "query_start": inputs["query_start"],
            "context_lens": inputs["context_lens"],
        },
        {"out": node.outputs[0]},
        {name: attributes[name] for name in _SHARED if name in attributes},
    )


SPLIT_ATTENTION = Rewrite(
    "split_attention", split_attention, requires=frozenset({"fill_kv_scales"})
)
