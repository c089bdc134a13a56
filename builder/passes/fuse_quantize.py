"""Fuses activation quantisation into the epilogue of the operator that produces the activation."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, input_of, is_fused, producer
from trtc.builder.passes.rewriter import Rewriter

_PRODUCERS = ("rms_norm", "swiglu", "paged_attention")
"""Operators that can quantise their own output."""


def fuse_quantize(rewriter: Rewriter) -> bool:
    """Quantise in the epilogue of the producer.

    Rule: quantize(p(...), pre_scale, out_scale) -> p(..., pre_scale, out_scale; out_dtype) for p
    one of rms_norm, swiglu and paged_attention, when nothing else reads p's result. A norm whose
    result is also read unquantised (by a router, or with other scales) keeps its quantize. So do
    results that have the scales of their rows: see fuse_row_quantize.
    """
    changed = False
    for quantize in rewriter.fused_nodes("quantize"):
        if quantize.attrs.get("scales"):
            continue
        node = producer(quantize.inputs[0])
        if node is not None and _fits(rewriter, node, quantize.inputs[0]):
            _fuse(rewriter, node, quantize)
            changed = True
    return changed


def _fits(rewriter: Rewriter, node: Node, tensor: Tensor) -> bool:
    return (
        any(is_fused(node, op) for op in _PRODUCERS)
        and node.outputs[0] is tensor
        and rewriter.sole_consumer(tensor) is not None
        and input_of(node, "pre_scale") is None
        and input_of(node, "out_scale") is None
    )


def _fuse(rewriter: Rewriter, node: Node, quantize: Node) -> None:
    for name in ("pre_scale", "out_scale"):
        tensor = input_of(quantize, name)
        if tensor is not None:
            rewriter.set_input(node, name, tensor)
    node.attrs["out_dtype"] = quantize.attrs["out_dtype"]
    rewriter.take_output(node, quantize.outputs[0])
    rewriter.retype(node)


FUSE_QUANTIZE = Rewrite(
    "fuse_quantize",
    fuse_quantize,
    requires=frozenset({"share_quantize", "lower_norms", "lower_swiglu", "fuse_add_norm"}),
)
