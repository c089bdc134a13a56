"""Activation quantisation that was not fused into its producer."""

from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.quantize.reference import reference

QUANTIZE = FusedOp(
    name="quantize",
    summary="out = quantize(x * pre_scale / out_scale)",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("pre_scale", ("K",), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "K"), ("f32", "bf16", "f8e4m3", "i8"), dtype_from="out_dtype"),
    ),
    attributes=(
        Attribute("out_dtype", "enum", choices=("f32", "bf16", "f8e4m3", "i8"), cpp_enum="DType"),
    ),
    reference=reference,
    # Every step is one IEEE operation and one rounding: kernels must agree bit for bit.
    tolerances={name: Tolerance(0.0, 0.0) for name in ("f32", "bf16", "f8e4m3", "i8")},
)
