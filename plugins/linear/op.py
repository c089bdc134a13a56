"""Linear layers: GEMM with weights of any type, and its epilogue."""

from trtc.plugins.linear.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

LINEAR = FusedOp(
    name="linear",
    summary="out = softcap(x @ (weight * weight_scale).T * input_scale + bias) + residual; "
    "x is multiplied by row_scale",
    inputs=(
        Parameter("x", ("M", "K"), ("f32", "bf16", "f8e4m3", "i8")),
        # [N, K] in layout row_major; in layouts packed and planes the bytes of plugins/layouts.py,
        # in layout compact (bf16) those of plugins/compact.py, in layout split (i6) those of
        # plugins/six_bits.py. Of iq4 (plugins/iq4.py) codes u4, of i6 (plugins/six_bits.py) i8.
        # In layout tiles (4-bit) weight, scale and zero are in the order of plugins/tiles.py.
        Parameter(
            "weight",
            ("N", "K"),
            ("f32", "bf16", "f8e4m3", "f4e2m1", "i8", "i4", "u4", "u8"),
            role="weight",
        ),
        # One a row of the weight (G = 1), or one a group of group_size input channels; in layout
        # packed or planes in the order of plugins/layouts.py. u8: of iq4 weights, bytes of
        # plugins/iq4.py, in the units of scale_unit; of f4e2m1 weights E4M3 in such units, or E8M0
        # without.
        Parameter("weight_scale", ("N", "G"), ("f32", "u8"), role="weight", optional=True),
        Parameter("weight_zero", ("N", "G"), ("u8",), role="weight", optional=True),
        Parameter("input_scale", (), ("f32",), role="weight", optional=True),
        Parameter("bias", ("N",), ("f32",), role="weight", optional=True),
        Parameter("residual", ("M", "N"), ("f32", "bf16"), optional=True),
        # Of x, one for each K / scales channels of a row: quantize's. More than one are of the
        # groups of the weight.
        Parameter("row_scale", ("M", "scales"), ("f32",), optional=True),
        Parameter("scale_unit", ("N",), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("out", ("M", "N"), ("f32", "bf16"), dtype_from="out_dtype"),),
    attributes=(
        Attribute("N", "int"),
        # Input channels that share a scale: whole blocks of the packed layout (8 if 4-bit,
        # 16 if 6-bit).
        # The last group may be shorter. 0: one scale a row.
        Attribute("group_size", "int", 0),
        Attribute(
            "weight_dtype",
            "enum",
            choices=("f32", "bf16", "f8e4m3", "f4e2m1", "i8", "i6", "i4", "u4", "iq4"),
            cpp_enum="DType",
        ),
        Attribute(
            "layout",
            "enum",
            "row_major",
            choices=("row_major", "packed", "planes", "compact", "tiles", "split"),
            cpp_enum="Layout",
        ),
        # dynamic_i8: bf16 x is rounded to int8 by row and group; for integer weights only.
        Attribute(
            "activation", "enum", "exact", choices=("exact", "dynamic_i8"), cpp_enum="Multiply"
        ),
        Attribute("softcap", "float", 0.0),
        Attribute("out_dtype", "enum", choices=("f32", "bf16"), cpp_enum="DType"),
    ),
    reference=reference,
    overwrites={"out": "residual"},
    # fp32 sums in another order than the reference; one ulp of bf16 after them.
    tolerances={"f32": Tolerance(1e-4, 1e-4), "bf16": Tolerance(1e-3, 1 / 128)},
)
