"""Gate and up projections of a gated MLP, fused with the activation."""

from trtc.plugins.gated_linear.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

GATED_LINEAR = FusedOp(
    name="gated_linear",
    summary="out = quantize(activation(x @ gate.T) * (x @ up.T)), products scaled as linear's",
    # All of x, weight and out in E4M3, with a weight_scale and either static scales of x and out or
    # scales of their rows; or in bf16, with none.
    inputs=(
        Parameter("x", ("M", "K"), ("bf16", "f8e4m3")),
        # [2 I, K], row-major: all rows of gate, then all of up.
        Parameter("weight", ("N", "K"), ("bf16", "f8e4m3"), role="weight"),
        Parameter("weight_scale", ("N", "G"), ("f32",), role="weight", optional=True),
        Parameter("input_scale", (), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
        Parameter("row_scale", ("M", "scales"), ("f32",), optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "I"), ("bf16", "f8e4m3"), dtype_from="weight_dtype"),
        Parameter("out_row_scale", ("M", "scales"), ("f32",), optional=True),
    ),
    attributes=(
        Attribute("I", "int"),
        Attribute("weight_dtype", "enum", choices=("bf16", "f8e4m3"), cpp_enum="DType"),
        Attribute("activation", "enum", choices=("silu", "gelu_tanh"), cpp_enum="Activation"),
        # Of a row of x and of out: one, or none.
        Attribute("scales", "int", 0),
    ),
    reference=reference,
    # What rounds both products to bf16 in between, and what does not, may round to neighbours.
    tolerances={"bf16": Tolerance(1e-3, 1 / 32), "f8e4m3": Tolerance(1 / 512, 1 / 8)},
)
