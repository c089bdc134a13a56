"""Fuses quantisation by the scales of rows into the operator that produces the activation."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, input_of, is_fused, producer
from trtc.builder.passes.rewriter import Rewriter

_PRODUCERS = ("rms_norm", "swiglu")
"""Operators of which a program has a whole row. One of attention has a row's heads apart."""


def fuse_row_quantize(rewriter: Rewriter) -> bool:
    """Quantise in the epilogue of the producer.

    Rule: quantize(p(...), pre_scale; scales, hadamard) -> p(..., pre_scale; scales, hadamard,
    out_dtype), with the scales of rows as its row_scale, for p one of rms_norm and swiglu, when
    nothing else reads p's result.
    """
    changed = False
    for quantize in rewriter.fused_nodes("quantize"):
        node = producer(quantize.inputs[0])
        if quantize.attrs.get("scales") and _fits(rewriter, node, quantize.inputs[0]):
            assert node is not None
            _fuse(rewriter, node, quantize)
            changed = True
    return changed


def _fits(rewriter: Rewriter, node: Node | None, tensor: Tensor) -> bool:
    return (
        any(is_fused(node, op) for op in _PRODUCERS)
        and node is not None
        and node.outputs[0] is tensor
        and rewriter.sole_consumer(tensor) is not None
        and input_of(node, "pre_scale") is None
        and input_of(node, "out_scale") is None
    )


def _fuse(rewriter: Rewriter, node: Node, quantize: Node) -> None:
    pre_scale = input_of(quantize, "pre_scale")
    if pre_scale is not None:
        rewriter.set_input(node, "pre_scale", pre_scale)
    node.attrs |= {name: quantize.attrs[name] for name in ("out_dtype", "scales", "hadamard")}
    codes, row_scale = quantize.outputs
    rewriter.take_output(node, codes)
    rewriter.give_output(node, "row_scale", row_scale)
    rewriter.retype(node)


FUSE_ROW_QUANTIZE = Rewrite(
    "fuse_row_quantize", fuse_row_quantize, requires=frozenset({"fuse_quantize"})
)
