"""Residual addition that was not fused into another operator, and a layer's scalar after it."""

from trtc.plugins.add.reference import reference
from trtc.plugins.op import FusedOp, Parameter, Tolerance

ADD = FusedOp(
    name="add",
    summary="out = (x + y) * factor",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("y", ("M", "K"), ("f32", "bf16")),
        # Rounded to x's type, as the sum is before it is multiplied.
        Parameter("factor", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("out", ("M", "K"), ("f32", "bf16"), dtype_from="x"),),
    reference=reference,
    overwrites={"out": "x"},
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
)
