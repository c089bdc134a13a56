"""Fuses quantisation by the scales of rows into the operator that produces the activation."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.fuse_quantize import quantize_in_producer
from trtc.builder.passes.rewriter import Rewriter

_PRODUCERS = ("rms_norm", "swiglu")
"""Operators of which a program has a whole row. One of attention has a row's heads apart."""


def fuse_row_quantize(rewriter: Rewriter) -> bool:
    """Quantise in the epilogue of the producer.

    Rule: quantize(p(...), pre_scale; scales, hadamard) -> p(..., pre_scale; scales, hadamard,
    out_dtype), with the scales of rows as its row_scale, for p one of rms_norm and swiglu. Others
    that read p's result are as in fuse_quantize.
    """
    changed = False
    for quantize in rewriter.fused_nodes("quantize"):
        if quantize.attrs.get("scales"):
            changed |= quantize_in_producer(rewriter, quantize, _PRODUCERS)
    return changed


FUSE_ROW_QUANTIZE = Rewrite(
    "fuse_row_quantize", fuse_row_quantize, requires=frozenset({"fuse_quantize"})
)
