"""The state-space recurrence of Mamba-2 over heads, and the gated norm of its result; or, where a
group's heads are on several ranks, what the norm reads (trtc.rms_scale does the rest)."""

from trtc.plugins.kv_pool import SSM_STATE, SSM_STATE_OUT
from trtc.plugins.mamba2.reference import reference
from trtc.plugins.op import Attribute, FusedOp, Parameter, Tolerance

MAMBA2 = FusedOp(
    name="mamba2",
    summary="out = group_rms_norm(ssm(split(xbc), softplus(dt + dt_bias)) * silu(z))",
    inputs=(
        Parameter("xbc", ("M", "heads*head_dim+2*groups*state_size"), ("f32", "bf16")),
        Parameter("z", ("M", "heads*head_dim"), ("f32", "bf16")),
        Parameter("dt", ("M", "heads"), ("f32", "bf16")),
        SSM_STATE,
        Parameter("query_start", ("B+1",), ("i32",), role="step"),
        Parameter("context_lens", ("B",), ("i32",), role="step"),
        Parameter("page_table", ("B", "P"), ("i32",), role="step"),
        Parameter("slots", ("M",), ("i32",), role="step"),
        Parameter("rate", ("heads",), ("f32",), role="weight"),
        Parameter("dt_bias", ("heads",), ("f32",), role="weight"),
        Parameter("skip", ("heads",), ("f32",), role="weight"),
        # Without it out is what it would have normalised, and squares are there.
        Parameter("norm", ("heads*head_dim",), ("f32",), role="weight", optional=True),
    ),
    outputs=(
        Parameter("out", ("M", "heads*head_dim"), ("f32", "bf16"), dtype_from="xbc"),
        SSM_STATE_OUT,
        # The sum of the squares of each group, before they are rounded.
        Parameter("squares", ("M", "groups"), ("f32",), optional=True),
    ),
    attributes=(
        Attribute("heads", "int"),
        Attribute("head_dim", "int"),
        # Of heads that share B and C, and a norm.
        Attribute("groups", "int"),
        Attribute("state_size", "int"),
        # What softplus gives is at least dt_min, and at most dt_max where that is not 0.
        Attribute("dt_min", "float", 0.0),
        Attribute("dt_max", "float", 0.0),
        Attribute("eps", "float"),
        Attribute("page_size", "int"),
    ),
    reference=reference,
    # Sums over state_size, in any order, of a state that remembers earlier ones.
    tolerances={"f32": Tolerance(2e-5, 1e-4), "bf16": Tolerance(1 / 128, 1 / 64)},
    in_place={"state_out": "state"},
    row_axes=("M", "B", "P", "num_pages"),
)
