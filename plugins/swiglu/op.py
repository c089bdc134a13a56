"""Activation of an MLP, gated or not, and the quantisation of its result."""

from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.swiglu.reference import reference

SWIGLU = FusedOp(
    name="swiglu",
    summary="out = quantize(activation(gate) * up), without up: quantize(activation(gate))",
    inputs=(
        Parameter("gate", ("M", "I"), ("f32", "bf16")),
        Parameter("up", ("M", "I"), ("f32", "bf16"), optional=True),
        Parameter("pre_scale", ("I",), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "I"), ("f32", "bf16", "f8e4m3", "i8"), dtype_from="out_dtype"),
        Parameter("row_scale", ("M", "scales"), ("f32",), optional=True),
    ),
    attributes=(
        Attribute(
            "activation",
            "enum",
            choices=("silu", "gelu_tanh", "relu2", "sigmoid"),
            cpp_enum="Activation",
        ),
        # Of a row of out, and blocks of it, as quantize's.
        Attribute("scales", "int", 0),
        Attribute("hadamard", "int", 0),
        Attribute("out_dtype", "enum", choices=("f32", "bf16", "f8e4m3", "i8"), cpp_enum="DType"),
    ),
    reference=reference,
    # The activation may round the other way: one ulp of the output type, twice for bf16.
    tolerances={
        "f32": Tolerance(1e-6, 1e-5),
        "bf16": Tolerance(1e-6, 1 / 64),
        "f8e4m3": Tolerance(1 / 512, 1 / 8),
        "i8": Tolerance(1.0, 0.0),
    },
)
