"""Fuses 4-bit linears with the norm before and the gated activation after them."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.fuse_gated_linear import gated_product
from trtc.builder.passes.matching import Node, dtype_of, input_of, is_fused, output_of, producer
from trtc.builder.passes.rewriter import Rewriter

_GIVEN = ("weight", "weight_scale", "weight_zero", "scale_unit", "bias")
_ABSENT = ("input_scale", "residual")
_PLAIN = {"layout": "tiles", "activation": "exact", "softcap": 0.0, "out_dtype": "bf16"}


def fuse_linears(rewriter: Rewriter) -> bool:
    """One launch instead of three, for steps of few rows.

    Rules, for a linear of bf16 x in tiles, with nothing but a bias in its epilogue:
        linear(rms_norm(x))               -> fused_linear(x, norm)
        swiglu(Split(linear(x)))          -> fused_linear(x; gate)
        swiglu(Split(linear(rms_norm(x))) -> fused_linear(x, norm; gate)
    where no other node reads the intermediate results, norm and swiglu give bf16, and the norm
    adds no residual and subtracts no mean.
    """
    changed = False
    for linear in rewriter.fused_nodes("linear"):
        if not _is_plain(linear):
            continue
        norm, swiglu = _norm_before(rewriter, linear), _swiglu_after(rewriter, linear)
        if norm is not None or swiglu is not None:
            _fuse(rewriter, linear, norm, swiglu)
            changed = True
    return changed


def _is_plain(linear: Node) -> bool:
    return (
        linear.attrs["weight_dtype"] in ("i4", "u4", "iq4", "f4e2m1")
        and dtype_of(linear.inputs[0]) == "bf16"
        and all(linear.attrs[name] == value for name, value in _PLAIN.items())
        and all(input_of(linear, name) is None for name in _ABSENT)
    )


def _norm_before(rewriter: Rewriter, linear: Node) -> Node | None:
    norm = producer(linear.inputs[0])
    is_plain = (
        norm is not None
        and is_fused(norm, "rms_norm")
        and norm.outputs[0] is linear.inputs[0]
        and rewriter.sole_consumer(linear.inputs[0]) is not None
        and output_of(norm, "normed") is None
        and dtype_of(norm.inputs[0]) == "bf16"
        and input_of(norm, "residual") is None
        and input_of(norm, "out_scale") is None
        and not norm.attrs.get("centered", 0)
    )
    return norm if is_plain else None


def _swiglu_after(rewriter: Rewriter, linear: Node) -> Node | None:
    split = rewriter.sole_consumer(linear.outputs[0], "Split")
    swiglu = rewriter.sole_consumer(split.outputs[0]) if split is not None else None
    is_plain = (
        swiglu is not None
        and is_fused(swiglu, "swiglu")
        and gated_product(rewriter, swiglu) is linear
        and swiglu.attrs["out_dtype"] == "bf16"
        and input_of(swiglu, "out_scale") is None
    )
    return swiglu if is_plain else None


def _fuse(rewriter: Rewriter, linear: Node, norm: Node | None, swiglu: Node | None) -> None:
    inputs = {"x": linear.inputs[0], **{name: input_of(linear, name) for name in _GIVEN}}
    attributes = {name: linear.attrs[name] for name in ("group_size", "weight_dtype")}
    attributes["I"] = linear.attrs["N"]
    out = linear.outputs[0]
    if norm is not None:
        inputs |= {"x": norm.inputs[0], "norm_weight": input_of(norm, "weight")}
        inputs["norm_pre_scale"] = input_of(norm, "pre_scale")
        attributes["eps"] = norm.attrs["eps"]
    if swiglu is not None:
        inputs["gate_pre_scale"] = input_of(swiglu, "pre_scale")
        attributes |= {"I": linear.attrs["N"] // 2, "gated": 1}
        attributes["activation"] = swiglu.attrs["activation"]
        out = swiglu.outputs[0]
    rewriter.fused("fused_linear", linear.name, inputs, {"out": out}, attributes)


FUSE_LINEARS = Rewrite(
    "fuse_linears",
    fuse_linears,
    requires=frozenset({"tile_weights", "lower_norms", "lower_swiglu", "fuse_quantize"}),
)
