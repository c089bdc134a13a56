"""Inputs of every layer: a row of a table by the token, beside a projection of its embedding."""

from trtc.plugins.layer_inputs.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

LAYER_INPUTS = FusedOp(
    name="layer_inputs",
    summary="out = (norm(projected) + table[token_ids] * table_scale) * scale, norm by width",
    inputs=(
        Parameter("projected", ("M", "K"), ("f32", "bf16")),
        Parameter("token_ids", ("M",), ("i32",), role="step"),
        Parameter("table", ("V", "K"), ("f32", "bf16"), role="weight"),
        Parameter("norm", ("width",), ("f32",), role="weight"),
    ),
    outputs=(Parameter("out", ("M", "K"), ("f32", "bf16"), dtype_from="projected"),),
    attributes=(
        # Columns of one layer, which are normalised together.
        Attribute("width", "int"),
        Attribute("eps", "float"),
        Attribute("table_scale", "float"),
        Attribute("scale", "float"),
    ),
    reference=reference,
    # The norm may round the other way, and the sum can cancel: ulps of the larger operand.
    tolerances={"f32": Tolerance(1e-5, 1e-5), "bf16": Tolerance(1 / 32, 1 / 64)},
)
