"""Residual addition that was not fused into another operator."""

from trtc.plugins.add.reference import reference
from trtc.plugins.op import FusedOp, Parameter, Tolerance

ADD = FusedOp(
    name="add",
    summary="out = x + y",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("y", ("M", "K"), ("f32", "bf16")),
    ),
    outputs=(Parameter("out", ("M", "K"), ("f32", "bf16"), dtype_from="x"),),
    reference=reference,
    overwrites={"out": "x"},
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
)
