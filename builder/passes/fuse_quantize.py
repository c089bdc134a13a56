"""Fuses activation quantisation into the epilogue of the operator that produces the activation."""

from collections.abc import Sequence

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, input_of, is_fused, output_of, producer
from trtc.builder.passes.rewriter import Rewriter

_PRODUCERS = ("rms_norm", "swiglu", "paged_attention", "gated_delta")
"""Operators that can quantise their own output."""
_UNQUANTIZED = {"rms_norm": "normed"}
"""Of those that can give their result as it is beside the quantised one, the output it is."""


def fuse_quantize(rewriter: Rewriter) -> bool:
    """Quantise in the epilogue of the producer.

    Rule: quantize(p(...), pre_scale, out_scale) -> p(..., pre_scale, out_scale; out_dtype) for p
    one of rms_norm, swiglu, paged_attention and gated_delta, when nothing else reads p's result.
    Others that read a norm's (a router, a quantize by other scales) read what it gives
    unquantised, `normed`. Results that have the scales of their rows keep their quantize: see
    fuse_row_quantize.
    """
    changed = False
    for quantize in rewriter.fused_nodes("quantize"):
        if not quantize.attrs.get("scales"):
            changed |= quantize_in_producer(rewriter, quantize, _PRODUCERS)
    return changed


def quantize_in_producer(rewriter: Rewriter, quantize: Node, producers: Sequence[str]) -> bool:
    """Let what makes a quantize's input do its work, if it is one of `producers` and can."""
    tensor = quantize.inputs[0]
    node = producer(tensor)
    if node is None or not any(is_fused(node, op) for op in producers):
        return False
    if not _fits(rewriter, node, tensor):
        return False
    is_shared = rewriter.sole_consumer(tensor) is None
    outputs = {name: output_of(quantize, name) for name in ("out", "row_scale")}
    for name in ("pre_scale", "out_scale"):
        scale = input_of(quantize, name)
        if scale is not None:
            rewriter.set_input(node, name, scale)
    node.attrs["out_dtype"] = quantize.attrs["out_dtype"]
    rewriter.take_output(node, outputs["out"])
    if outputs["row_scale"] is not None:
        node.attrs |= {name: quantize.attrs[name] for name in ("scales", "hadamard")}
        rewriter.give_output(node, "row_scale", outputs["row_scale"])
    if is_shared:
        rewriter.give_output(node, _UNQUANTIZED[node.op], tensor)
    rewriter.retype(node)
    return True


def _fits(rewriter: Rewriter, node: Node, tensor: Tensor) -> bool:
    return (
        node.outputs[0] is tensor
        and (rewriter.sole_consumer(tensor) is not None or node.op in _UNQUANTIZED)
        and input_of(node, "pre_scale") is None
        and input_of(node, "out_scale") is None
    )


FUSE_QUANTIZE = Rewrite(
    "fuse_quantize",
    fuse_quantize,
    requires=frozenset({"share_quantize", "lower_norms", "lower_swiglu", "fuse_add_norm"}),
)
