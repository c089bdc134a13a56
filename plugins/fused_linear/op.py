"""A linear of 4-bit weights, fused with the norm before and the gated activation after it."""

from trtc.plugins.fused_linear.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

FUSED_LINEAR = FusedOp(
    name="fused_linear",
    summary="out = swiglu(linear(rms_norm(x))), the norm, the gate or both; rounded as they round",
    inputs=(
        Parameter("x", ("M", "K"), ("bf16",)),
        Parameter("norm_weight", ("K",), ("f32",), role="weight", optional=True),
        Parameter("norm_pre_scale", ("K",), ("f32",), role="weight", optional=True),
        # All in the order of plugins/tiles.py. With a gate: all rows of gate, then all of up.
        Parameter("weight", ("N", "K"), ("i4", "u4", "f4e2m1"), role="weight"),
        # u8: bytes, as linear's.
        Parameter("weight_scale", ("N", "G"), ("f32", "u8"), role="weight"),
        Parameter("weight_zero", ("N", "G"), ("u8",), role="weight", optional=True),
        Parameter("bias", ("N",), ("f32",), role="weight", optional=True),
        Parameter("gate_pre_scale", ("I",), ("f32",), role="weight", optional=True),
        Parameter("scale_unit", ("N",), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("out", ("M", "I"), ("bf16",)),),
    attributes=(
        # Columns of out: N, or half of it with a gate.
        Attribute("I", "int"),
        Attribute("group_size", "int", 0),
        Attribute("weight_dtype", "enum", choices=("i4", "u4", "iq4", "f4e2m1"), cpp_enum="DType"),
        Attribute("eps", "float", 0.0),
        # 1: with a gate, whose activation is the next one.
        Attribute("gated", "int", 0),
        Attribute(
            "activation", "enum", "silu", choices=("silu", "gelu_tanh"), cpp_enum="Activation"
        ),
    ),
    reference=reference,
    # Roundings of x that fall the other way add up in a sum; those of both products multiply.
    tolerances={"bf16": Tolerance(1e-3, 1 / 64)},
)
