"""The gated delta rule over heads, whose state is a matrix, and the gated norm of its result, with
the quantisation after it."""

from trtc.plugins.gated_delta.reference import reference
from trtc.plugins.kv_pool import MATRIX, MATRIX_OUT
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

GATED_DELTA = FusedOp(
    name="gated_delta",
    summary="out = quantize(rms_norm(delta_rule(split(qkv), sigmoid(b), decay(a))) * gate(z)), "
    "by heads",
    inputs=(
        Parameter("qkv", ("M", "2*key_heads*key_dim+value_heads*value_dim"), ("f32", "bf16")),
        Parameter("z", ("M", "value_heads*value_dim"), ("f32", "bf16")),
        Parameter("b", ("M", "value_heads"), ("f32", "bf16")),
        Parameter("a", ("M", "value_heads*decays"), ("f32", "bf16")),
        MATRIX,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("rate", ("value_heads",), ("f32",), role="weight"),
        Parameter("dt_bias", ("value_heads*decays",), ("f32",), role="weight"),
        Parameter("norm", ("value_dim",), ("f32",), role="weight"),
        Parameter("pre_scale", ("value_heads*value_dim",), ("f32",), role="weight", optional=True),
        Parameter("out_scale", (), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter(
            "out",
            ("M", "value_heads*value_dim"),
            ("f32", "bf16", "f8e4m3", "i8"),
            dtype_from="out_dtype",
        ),
        MATRIX_OUT,
    ),
    attributes=(
        Attribute("key_heads", "int"),
        Attribute("key_dim", "int"),
        Attribute("value_heads", "int"),
        Attribute("value_dim", "int"),
        # A head has one, or each of its key channels its own: key_dim.
        Attribute("decays", "int", default=1),
        # Of sigmoid(b); 2: what a key stands for may turn its sign, not only fade.
        Attribute("write_scale", "float", default=1.0),
        Attribute("gate", "enum", "silu", ("silu", "sigmoid"), "Activation"),
        Attribute("eps", "float"),
        Attribute("page_size", "int"),
        Attribute("out_dtype", "enum", choices=("f32", "bf16", "f8e4m3", "i8"), cpp_enum="DType"),
    ),
    reference=reference,
    # Sums over key_dim, in any order, of a state that remembers earlier ones.
    tolerances={
        "f32": Tolerance(2e-5, 1e-4),
        "bf16": Tolerance(1 / 128, 1 / 64),
        "f8e4m3": Tolerance(1 / 128, 1 / 8),
        "i8": Tolerance(1.0, 0.0),
    },
    in_place={"state_out": "state"},
    row_axes=("M", "B", "P", "num_pages"),
)
