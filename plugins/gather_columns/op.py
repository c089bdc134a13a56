"""Some channels of an activation in a given order: that of a linear's groups (act-order), or a
rank's channels of what every rank has whole."""

from trtc.plugins.gather_columns.reference import reference
from trtc.plugins.op import FusedOp, Parameter, Tolerance

GATHER_COLUMNS = FusedOp(
    name="gather_columns",
    summary="out = x[:, columns]",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("columns", ("N",), ("i32",), role="weight"),
    ),
    outputs=(Parameter("out", ("M", "N"), ("f32", "bf16"), dtype_from="x"),),
    reference=reference,
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
)
