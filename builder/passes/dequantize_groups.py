"""Dequantises activations in groups before they are multiplied, for the CPU target."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, dtype_of, input_of, is_fused, output_of
from trtc.builder.passes.rewriter import Rewriter


def dequantize_groups(rewriter: Rewriter) -> bool:
    """Multiply what E4M3 codes stand for where a row has several scales.

    Rule, for scales > 1: linear(quantize(x; scales)) -> linear(quantize(x; scales, codes=f8e4m3)),
    whose result is f32, for all linears that read it.

    Products of f32 are as exact as sums of groups of E4M3 products with two scales each, which are
    for machines that have such products.
    """
    changed = False
    for quantize in rewriter.fused_nodes("quantize"):
        if quantize.attrs.get("scales", 0) > 1 and quantize.attrs["codes"] == "none":
            _dequantize(rewriter, quantize)
            changed = True
    return changed


def _dequantize(rewriter: Rewriter, quantize: Node) -> None:
    readers = list(quantize.outputs[0].outputs)
    assert all(is_fused(reader, "linear") for reader in readers), quantize.name
    quantize.attrs["codes"] = dtype_of(quantize.outputs[0])
    quantize.attrs["out_dtype"] = "f32"
    row_scale = output_of(quantize, "row_scale")
    for reader in readers:
        assert input_of(reader, "row_scale") is row_scale, reader.name
        rewriter.clear_input(reader, "row_scale")
    rewriter.drop_output(quantize, "row_scale")
    rewriter.retype(quantize)


DEQUANTIZE_GROUPS = Rewrite(
    "dequantize_groups", dequantize_groups, requires=frozenset({"fuse_quantize"})
)
