"""RMSNorm of rows of which several ranks have channels, given the sum of all their squares."""

from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance
from trtc.plugins.rms_scale.reference import reference

RMS_SCALE = FusedOp(
    name="rms_scale",
    summary="out = x / sqrt(squares / width + eps) * weight",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        # The sum of the squares of a whole row.
        Parameter("squares", ("M", "1"), ("f32",)),
        Parameter("weight", ("K",), ("f32",), role="weight"),
    ),
    outputs=(Parameter("out", ("M", "K"), ("f32", "bf16"), dtype_from="x"),),
    attributes=(
        # Channels of a whole row.
        Attribute("width", "int"),
        Attribute("eps", "float"),
    ),
    reference=reference,
    overwrites={"out": "x"},
    # One ulp of the output type, as rms_norm.
    tolerances={"f32": Tolerance(1e-6, 1e-5), "bf16": Tolerance(1e-6, 1 / 128)},
)
