"""Removes rounding to E4M3 before matrix products, for machines without E4M3 arithmetic."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, is_fused, is_op, producer
from trtc.builder.passes.rewriter import Rewriter


def drop_e4m3_rounding(rewriter: Rewriter) -> bool:
    """Let matrix products read the tensor before its rounding to E4M3.

    Rules, where the codes are E4M3:
        DequantizeLinear(QuantizeLinear(x, scale), scale) -> x, of an activation, or a 4-bit weight
            that the graph dequantises to E4M3 (W4A8)
        DequantizeLinear(trtc.quantize(x)) -> x, of an activation whose rows have scales

    It departs from the source graph by what E4M3 costs; the accuracy report counts it, and exact
    activations leave this pass out.
    """
    changed = False
    for dequantize in rewriter.nodes("DequantizeLinear"):
        quantize = producer(dequantize.inputs[0])
        if quantize is None or dtype_of(quantize.outputs[0]) != "f8e4m3":
            continue
        x, rounded = quantize.inputs[0], dequantize.outputs[0]
        if is_fused(quantize, "quantize"):
            rewriter.replace_uses(rounded, x)
            changed = True
            continue
        if not is_op(quantize, "QuantizeLinear"):
            continue
        same_scale = rewriter.same_weight(quantize.inputs[1], dequantize.inputs[1])
        if same_scale and dtype_of(x) == dtype_of(rounded):
            rewriter.replace_uses(rounded, x)
            changed = True
    return changed


DROP_E4M3_ROUNDING = Rewrite("drop_e4m3_rounding", drop_e4m3_rounding)
