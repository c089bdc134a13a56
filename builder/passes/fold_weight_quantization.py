"""Folds weights that are dequantised only to be quantised again into E4M3 weights."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, dtype_of, is_weight, producer, site_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import RequantizeToE4M3


def fold_weight_quantization(rewriter: Rewriter) -> bool:
    """Fold the weight path of W4A8 into one tensor.

    Rules:
        QuantizeLinear(DequantizeLinear(w4, scale[, zero]), scale_2) -> w8
        where w4 is an i4 or u4 initialiser in groups along K, and the result is E4M3.

    The new initialiser holds exactly the E4M3 values that the two nodes compute.
    """
    changed = False
    for quantize in rewriter.nodes("QuantizeLinear"):
        dequantize = producer(quantize.inputs[0], "DequantizeLinear")
        if dequantize is None or not _is_grouped_weight(dequantize):
            continue
        if dtype_of(quantize.outputs[0]) != "f8e4m3" or not is_weight(quantize.inputs[1]):
            continue
        _fold(rewriter, dequantize, quantize)
        changed = True
    return changed


def _is_grouped_weight(dequantize: Node) -> bool:
    return (
        all(is_weight(tensor) for tensor in dequantize.inputs)
        and dtype_of(dequantize.inputs[0]) in ("i4", "u4")
        and len(dequantize.inputs[1].shape) == 2
        and dequantize.attrs.get("axis", 1) in (1, -1)
    )


def _fold(rewriter: Rewriter, dequantize: Node, quantize: Node) -> None:
    weight, scale, *zero = dequantize.inputs
    folded = rewriter.derived(
        f"{site_of(quantize)}.weight.f8e4m3",
        RequantizeToE4M3(through=dtype_of(dequantize.outputs[0])),
        (weight, scale, quantize.inputs[1], *zero),
        "f8e4m3",
        weight.shape,
    )
    rewriter.replace_uses(quantize.outputs[0], folded)


FOLD_WEIGHT_QUANTIZATION = Rewrite("fold_weight_quantization", fold_weight_quantization)
