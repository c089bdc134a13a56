"""Sum over the ranks of a sharded model: completes row-parallel linears."""

from trtc.plugins.all_reduce.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

ALL_REDUCE = FusedOp(
    name="all_reduce",
    summary="out = sum of every rank's x, the same on all of them",
    inputs=(Parameter("x", ("M", "K"), ("f32", "bf16")),),
    outputs=(Parameter("out", ("M", "K"), ("f32", "bf16"), dtype_from="x"),),
    attributes=(Attribute("ranks", "int"),),
    reference=reference,
    overwrites={"out": "x"},
    # Sums may be rounded after each rank, of up to eight.
    tolerances={"f32": Tolerance(1e-6, 1e-6), "bf16": Tolerance(1 / 64, 1 / 64)},
    collective=True,
)
