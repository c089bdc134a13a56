"""An int8 lm_head: the native targets' choice where bf16 would be a large part of a step."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import GroupCodes, GroupScales

GROUP = 128
"""Input channels that share a scale."""


def quantize_lm_head(rewriter: Rewriter) -> bool:
    """Store the lm_head as int8, and the embedding table with it where they are one.

    Rules, for the linear that gives the graph's logits:
        linear(x, weight [N, K] bf16)   -> linear(x, i8, weight_scale [N, G]; group_size=128)
        embedding(ids, the same weight) -> embedding(ids, i8, table_scale; group_size=128)

    This rounds weights that the source graph has in bf16; the accuracy report counts it, and an
    exact lm_head leaves this pass out.
    """
    changed = False
    for node in rewriter.fused_nodes("linear"):
        if rewriter.is_output(node.outputs[0]) and node.attrs["weight_dtype"] == "bf16":
            weight = input_of(node, "weight")
            assert weight is not None, f"{node.name} has no weight"
            codes, scales = _narrowed(rewriter, weight)
            for lookup in rewriter.fused_nodes("embedding"):
                _look_up_codes(rewriter, lookup, weight, codes, scales)
            rewriter.set_input(node, "weight_scale", scales)
            rewriter.set_input(node, "weight", codes)
            node.attrs |= {"weight_dtype": "i8", "group_size": GROUP}
            changed = True
    return changed


def _narrowed(rewriter: Rewriter, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, depth = weight.shape
    shape = (rows, -(-depth // GROUP))
    codes = rewriter.derived(f"{weight.name}.i8", GroupCodes(GROUP), (weight,), "i8", weight.shape)
    scales = rewriter.derived(f"{weight.name}.scale", GroupScales(GROUP), (weight,), "f32", shape)
    return codes, scales


def _look_up_codes(
    rewriter: Rewriter, node: Node, weight: Tensor, codes: Tensor, scales: Tensor
) -> None:
    table = input_of(node, "table")
    assert table is not None, f"{node.name} has no table"
    if table.name == weight.name and dtype_of(table) == "bf16":
        rewriter.set_input(node, "table_scale", scales)
        rewriter.set_input(node, "table", codes)
        node.attrs["group_size"] = GROUP


QUANTIZE_LM_HEAD = Rewrite(
    "quantize_lm_head",
    quantize_lm_head,
    requires=frozenset({"lower_linears", "lower_embedding"}),
)
