"""Embedding lookup with an optional scale."""

from trtc.plugins.embedding.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

EMBEDDING = FusedOp(
    name="embedding",
    summary="out = (table * table_scale)[token_ids] * scale",
    inputs=(
        Parameter("token_ids", ("M",), ("i32",), role="step"),
        # [V, H] in layout row_major; of iq4 codes u4, of i6 i8. In the other layouts as a linear's
        # weight.
        Parameter("table", ("V", "H"), ("f32", "bf16", "i8", "u8", "u4"), role="weight"),
        # Of an int8 or iq4 table: one a group of group_size columns, in the same layout. u8: bytes
        # of plugins/iq4.py, in the units of scale_unit.
        Parameter("table_scale", ("V", "G"), ("f32", "u8"), role="weight", optional=True),
        Parameter("scale_unit", ("V",), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("out", ("M", "H"), ("f32", "bf16"), dtype_from="out_dtype"),),
    attributes=(
        # Of the table, which its bytes do not say.
        Attribute("V", "int"),
        Attribute("H", "int"),
        Attribute(
            "weight_dtype", "enum", choices=("f32", "bf16", "i8", "i6", "iq4"), cpp_enum="DType"
        ),
        Attribute("scale", "float", default=1.0),
        Attribute("group_size", "int", 0),
        Attribute(
            "layout",
            "enum",
            "row_major",
            choices=("row_major", "packed", "planes", "tiles", "split"),
            cpp_enum="Layout",
        ),
        Attribute("out_dtype", "enum", choices=("f32", "bf16"), cpp_enum="DType"),
    ),
    reference=reference,
    tolerances={"f32": Tolerance(0.0, 0.0), "bf16": Tolerance(0.0, 0.0)},
)
