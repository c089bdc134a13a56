"""Selection of the rows that need logits."""

from trtc.plugins.gather_rows.reference import reference
from trtc.plugins.op import FusedOp, Parameter, Tolerance

GATHER_ROWS = FusedOp(
    name="gather_rows",
    summary="out = x[rows]",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16")),
        Parameter("rows", ("R",), ("i32",), role="step"),
    ),
    outputs=(Parameter("out", ("R", "K"), ("f32", "bf16"), dtype_from="x"),),
    reference=reference,
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
    row_axes=("M", "R"),
)
