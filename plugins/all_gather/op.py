"""Concatenates every rank's columns: whole logits from an lm_head that is split by vocabulary."""

from trtc.plugins.all_gather.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

ALL_GATHER = FusedOp(
    name="all_gather",
    summary="out = the columns of rank 0's x, then rank 1's, ..., the same on all of them",
    inputs=(Parameter("x", ("M", "K"), ("f32", "bf16")),),
    outputs=(Parameter("out", ("M", "ranks*K"), ("f32", "bf16"), dtype_from="x"),),
    attributes=(Attribute("ranks", "int"),),
    reference=reference,
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
    collective=True,
)
