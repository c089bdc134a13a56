"""Routed experts: the whole mixture-of-experts MLP after its router."""

from trtc.plugins.moe.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

_WEIGHTS = ("f32", "bf16", "f8e4m3", "f4e2m1", "i8", "i4", "u4", "u8")
_SCALES = ("f32", "u8")
"""u8: of E2M1 weights, E4M3 in the units of scale_unit, or E8M0 without, 2^(scale - 127). Rows may
be longer than there are groups."""

MOE = FusedOp(
    name="moe",
    summary="out = sum over the top_k experts of weight * expert(x), "
    "+ sigmoid(shared_gate) * shared + residual; the router is in plugins/moe/routing.py",
    inputs=(
        Parameter("x", ("M", "H"), ("f32", "bf16")),
        Parameter("router_logits", ("M", "E"), ("f32",)),
        # Of L experts: all E, or those that expert_map numbers. Gate rows before up rows, or up
        # rows alone. In layouts packed, compact and split: the experts' bytes one after another; in
        # layout tiles (4-bit) the weights, scales and zeros of each as plugins/tiles.py says.
        Parameter("gate_up", ("L", "parts*I", "H"), _WEIGHTS, role="weight"),
        Parameter("down", ("L", "H", "I"), _WEIGHTS, role="weight"),
        Parameter("gate_up_scale", ("L", "parts*I", "GH"), _SCALES, role="weight", optional=True),
        Parameter("down_scale", ("L", "H", "GI"), _SCALES, role="weight", optional=True),
        Parameter("gate_up_zero", ("L", "parts*I", "GH"), ("u8",), role="weight", optional=True),
        Parameter("down_zero", ("L", "H", "GI"), ("u8",), role="weight", optional=True),
        Parameter("gate_up_input_scale", ("L",), ("f32",), role="weight", optional=True),
        Parameter("down_input_scale", ("L",), ("f32",), role="weight", optional=True),
        Parameter("gate_up_pre_scale", ("L", "H"), ("f32",), role="weight", optional=True),
        Parameter("down_pre_scale", ("L", "I"), ("f32",), role="weight", optional=True),
        Parameter("gate_up_bias", ("L", "parts*I"), ("f32",), role="weight", optional=True),
        Parameter("down_bias", ("L", "H"), ("f32",), role="weight", optional=True),
        Parameter("residual", ("M", "H"), ("f32", "bf16"), optional=True),
        Parameter("choice_bias", ("E",), ("f32",), role="weight", optional=True),
        # What a shared expert gives, and the logit of its own weight.
        Parameter("shared", ("M", "H"), ("f32", "bf16"), optional=True),
        Parameter("shared_gate", ("M", "1"), ("f32",), optional=True),
        # Multiplies the weight of each expert in the end.
        Parameter("expert_scale", ("E",), ("f32",), role="weight", optional=True),
        # Each expert's place among the L; -1: it is another rank's, and adds nothing here.
        Parameter("expert_map", ("E",), ("i32",), role="weight", optional=True),
        # In which order each expert has the channels of x, whose groups were scattered (act-order).
        Parameter("gate_up_order", ("L", "H"), ("i32",), role="weight", optional=True),
        Parameter("gate_up_scale_unit", ("L", "parts*I"), ("f32",), role="weight", optional=True),
        Parameter("down_scale_unit", ("L", "H"), ("f32",), role="weight", optional=True),
    ),
    outputs=(Parameter("out", ("M", "H"), ("f32", "bf16"), dtype_from="out_dtype"),),
    attributes=(
        Attribute("I", "int"),
        # 2: activation(gate) * up. 1: activation(up), without limit and up_offset.
        Attribute("parts", "int", 2),
        Attribute("top_k", "int"),
        Attribute(
            "score",
            "enum",
            "softmax",
            choices=("softmax", "sigmoid", "sparsemixer"),
            cpp_enum="Score",
        ),
        # Of sparsemixer: which experts compete with the one that is chosen.
        Attribute("margin", "float", 0.0),
        # Of neighbouring experts; a row's experts come from the top_groups best.
        Attribute("num_groups", "int", 1),
        Attribute("top_groups", "int", 1),
        Attribute(
            "group_score", "enum", "top2_sum", choices=("max", "top2_sum"), cpp_enum="GroupScore"
        ),
        Attribute("renormalize", "int"),
        # Added to the sum that weights are divided by.
        Attribute("epsilon", "float", 0.0),
        Attribute("scale", "float", 1.0),
        # Weights multiply what experts read, in place of what they give.
        Attribute("weighs_inputs", "int", 0),
        Attribute(
            "activation",
            "enum",
            choices=("silu", "gelu_tanh", "quick_gelu", "relu2"),
            cpp_enum="Activation",
        ),
        # Where it is not 0, gate is at most the limit, and up within plus and minus it.
        Attribute("limit", "float", 0.0),
        # Added to up.
        Attribute("up_offset", "float", 0.0),
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
            choices=("row_major", "packed", "compact", "tiles", "split"),
            cpp_enum="Layout",
        ),
        # How each expert's inputs are rounded: static scales for f8e4m3 and i8, dynamic ones by
        # row, or by row and group of the weights.
        Attribute(
            "act_quant",
            "enum",
            "none",
            choices=("none", "f8e4m3", "i8", "dynamic_f8e4m3", "dynamic_i8"),
            cpp_enum="ActQuant",
        ),
        # With dynamic scales: channels of those inputs that a Hadamard matrix of +-1 multiplies
        # together before, as quantize's.
        Attribute("hadamard", "int", 0),
        Attribute("out_dtype", "enum", choices=("f32", "bf16"), cpp_enum="DType"),
    ),
    reference=reference,
    # Rounding the hidden activations the other way moves sums by a fraction of an ulp each.
    tolerances={"f32": Tolerance(1e-4, 1e-4), "bf16": Tolerance(2e-2, 1 / 64)},
)
