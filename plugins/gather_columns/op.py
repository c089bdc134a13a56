"""The channels of an activation in the order in which a linear's groups have them (act-order)."""

from trtc.plugins.gather_columns.reference import reference
from trtc.plugins.op import FusedOp, Parameter, Tolerance

GATHER_COLUMNS = FusedOp(
    name="gather_columns",
    summary="out = x[:, columns]",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("columns", ("K",), ("i32",), role="weight"),
    ),
    outputs=(Parameter("out", ("M", "K"), ("f32", "bf16"), dtype_from="x"),),
    reference=reference,
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
)
