"""Activation quantisation that was not fused into its producer."""

from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.quantize.reference import reference

QUANTIZE = FusedOp(
    name="quantize",
    summary="out = quantize(x * pre_scale / out_scale), or by scales that follow from x",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("pre_scale", ("K",), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "K"), ("f32", "bf16", "f8e4m3", "i8"), dtype_from="out_dtype"),
        # What a code of each K / scales channels of a row is worth.
        Parameter("row_scale", ("M", "scales"), ("f32",), optional=True),
    ),
    attributes=(
        Attribute("out_dtype", "enum", choices=("f32", "bf16", "f8e4m3", "i8"), cpp_enum="DType"),
        # Of a row of out, by the largest magnitudes of x * pre_scale; 0: out_scale is the scale.
        Attribute("scales", "int", 0),
        # With scales: channels of x * pre_scale that a Hadamard matrix of +-1 multiplies together,
        # in f32, before codes are made of them; a power of two. 0: none.
        Attribute("hadamard", "int", 0),
        # With scales: what out's codes are dequantised from, in floating-point outputs.
        Attribute("codes", "enum", "none", choices=("none", "f8e4m3"), cpp_enum="ActQuant"),
    ),
    reference=reference,
    # Every step is one IEEE operation and one rounding: kernels must agree bit for bit.
    tolerances={name: Tolerance(0.0, 0.0) for name in ("f32", "bf16", "f8e4m3", "i8")},
)
