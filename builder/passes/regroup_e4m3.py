"""Stores E4M3 weights as int8 in groups, for machines whose int8 arithmetic is faster."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import GroupCodes, GroupScales, power_of_two_scale
from trtc.plugins.layouts import WEIGHTS

GROUP = 128
"""Input channels that share a scale."""


def regroup_e4m3(rewriter: Rewriter) -> bool:
    """Store E4M3 weights as int8 codes of groups of input channels.

    Rules, for E4M3 weights [N, K] or [E, N, K] with a scale a row, and activations in bf16:
        linear(x, w, s [N, 1])            -> linear(x, i8, s' [N, G]; group_size=128)
        moe(x, _, w [E, N, K], s, ...)    -> the same for both of its weights, without the rounding
                                             of its inputs, static or dynamic; act_quant=none

    A group's scale is the power of two that makes integers of the four highest binades of E4M3 in
    it: only weights below an eighth of their group's largest are rounded, by at most 1/128 of it.
    The accuracy report counts it, and exact activations leave this pass out.
    """
    changed = False
    for op, names in WEIGHTS.items():
        for node in rewriter.fused_nodes(op):
            if node.attrs["weight_dtype"] == "f8e4m3" and dtype_of(node.inputs[0]) == "bf16":
                for name in names:
                    _regroup(rewriter, node, name)
                node.attrs |= {"weight_dtype": "i8", "group_size": GROUP}
                changed = True
    return changed


def _regroup(rewriter: Rewriter, node: Node, name: str) -> None:
    weight, scale = input_of(node, name), input_of(node, f"{name}_scale")
    assert weight is not None and scale is not None, f"{node.name} lacks {name} or its scale"
    *rows, depth = weight.shape
    codes = rewriter.derived(
        f"{weight.name}.i8",
        GroupCodes(GROUP, power_of_two_scale),
        (weight,),
        "i8",
        tuple(weight.shape),
    )
    scales = rewriter.derived(
        f"{scale.name}.groups",
        GroupScales(GROUP, power_of_two_scale),
        (weight, scale),
        "f32",
        (*rows, -(-depth // GROUP)),
    )
    rewriter.set_input(node, f"{name}_scale", scales)
    rewriter.set_input(node, name, codes)
    if node.op == "moe":
        rewriter.clear_input(node, f"{name}_input_scale")
        node.attrs["act_quant"] = "none"


REGROUP_E4M3 = Rewrite("regroup_e4m3", regroup_e4m3, requires=frozenset({"merge_linears"}))
