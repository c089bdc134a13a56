"""RMSNorm and LayerNorm, with the residual addition before and the quantisation after."""

from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.rms_norm.reference import reference

RMS_NORM = FusedOp(
    name="rms_norm",
    summary="total = x + residual; normed = norm(total) * weight + bias; out = quantize(normed)",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("residual", ("M", "K"), ("f32", "bf16"), optional=True),
        Parameter("weight", ("K",), ("f32",), role="weight"),
        Parameter("bias", ("K",), ("f32",), role="weight", optional=True),
        Parameter("pre_scale", ("K",), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "K"), ("f32", "bf16", "f8e4m3", "i8"), dtype_from="out_dtype"),
        Parameter("total", ("M", "K"), ("f32", "bf16"), optional=True, dtype_from="x"),
        Parameter("row_scale", ("M", "scales"), ("f32",), optional=True),
        # What out is made of, for those who read it as it is.
        Parameter("normed", ("M", "K"), ("f32", "bf16"), optional=True, dtype_from="x"),
    ),
    attributes=(
        Attribute("eps", "float"),
        # 1: LayerNorm, which subtracts a row's mean first.
        Attribute("centered", "int", default=0),
        # Of a row of out, and blocks of it, as quantize's.
        Attribute("scales", "int", 0),
        Attribute("hadamard", "int", 0),
        Attribute("out_dtype", "enum", choices=("f32", "bf16", "f8e4m3", "i8"), cpp_enum="DType"),
    ),
    reference=reference,
    # One ulp of the output type: kernels may sum in another order.
    tolerances={
        "f32": Tolerance(1e-6, 1e-5),
        "bf16": Tolerance(1e-6, 1 / 128),
        "f8e4m3": Tolerance(1 / 512, 1 / 8),
        "i8": Tolerance(1.0, 0.0),
    },
)
