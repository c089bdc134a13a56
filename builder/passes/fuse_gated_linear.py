"""Gate, up and the activation over them as one operator: in bf16, or where both are E4M3."""

from collections.abc import Mapping

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import (
    Node,
    Tensor,
    dtype_of,
    input_of,
    is_fused,
    output_of,
    producer,
)
from trtc.builder.passes.rewriter import Rewriter

_STATIC, _BY_ROW = ("weight_scale", "input_scale"), ("weight_scale", "row_scale")
_SCALES: Mapping[str, tuple[tuple[str, ...], ...]] = {"bf16": ((),), "f8e4m3": (_STATIC, _BY_ROW)}
"""That a linear may have, by the type of its weight."""
_INPUTS = ("weight_scale", "input_scale", "row_scale", "weight_zero", "bias", "residual")
_PLAIN = {"layout": "row_major", "group_size": 0, "softcap": 0.0, "out_dtype": "bf16"}


def fuse_gated_linear(rewriter: Rewriter) -> bool:
    """Fuse both products with the activation, so that neither is written to memory.

    Rule: swiglu(Split(linear(x, [gate; up])); out_dtype=D) -> gated_linear(x, [gate; up])
    for halves of a row-major linear of x and weight in D with bf16 out, without another reader:
    where D is f8e4m3 with both scales and a swiglu with an out_scale, or with scales of rows, one
    each, in place of input_scale and out_scale; where it is bf16 without any; and with nothing else
    in either's epilogue.
    """
    changed = False
    for swiglu in rewriter.fused_nodes("swiglu"):
        linear = gated_product(rewriter, swiglu)
        if linear is None or not _is_plain(linear) or not _is_alike(swiglu, linear):
            continue
        outputs: dict[str, Tensor] = {"out": swiglu.outputs[0]}
        row_scale = output_of(swiglu, "row_scale")
        if row_scale is not None:
            outputs["out_row_scale"] = row_scale
        rewriter.fused(
            "gated_linear",
            linear.name,
            inputs={
                "x": linear.inputs[0],
                "out_scale": input_of(swiglu, "out_scale"),
                **{name: input_of(linear, name) for name in ("weight", *_scales_of(linear))},
            },
            outputs=outputs,
            attributes={
                "I": linear.attrs["N"] // 2,
                "weight_dtype": linear.attrs["weight_dtype"],
                "activation": swiglu.attrs["activation"],
                "scales": swiglu.attrs.get("scales", 0),
            },
        )
        changed = True
    return changed


def gated_product(rewriter: Rewriter, swiglu: Node) -> Node | None:
    """The linear whose first half is gate and whose second is up, for this swiglu alone."""
    halves = [input_of(swiglu, name) for name in ("gate", "up")]
    if halves[1] is None:
        return None
    split = producer(halves[0], "Split")
    if split is None or list(map(id, split.outputs)) != list(map(id, halves)):
        return None
    linear = producer(split.inputs[0])
    alone = all(rewriter.sole_consumer(tensor) for tensor in (*halves, split.inputs[0]))
    return linear if alone and is_fused(linear, "linear") else None


def _is_plain(linear: Node) -> bool:
    dtype = linear.attrs["weight_dtype"]
    return (
        _scales_of(linear) in _SCALES.get(dtype, ())
        and dtype_of(linear.inputs[0]) == dtype
        and all(linear.attrs[name] == value for name, value in _PLAIN.items())
    )


def _scales_of(linear: Node) -> tuple[str, ...]:
    """Its inputs beside x and the weight."""
    return tuple(name for name in _INPUTS if input_of(linear, name) is not None)


def _is_alike(swiglu: Node, linear: Node) -> bool:
    """Whether a swiglu gives what the linear takes."""
    scales = _scales_of(linear)
    return (
        swiglu.attrs["out_dtype"] == linear.attrs["weight_dtype"]
        and (input_of(swiglu, "out_scale") is not None) == (scales == _STATIC)
        and swiglu.attrs.get("scales", 0) == int(scales == _BY_ROW)
        and not swiglu.attrs.get("hadamard", 0)
        and input_of(swiglu, "pre_scale") is None
    )


FUSE_GATED_LINEAR = Rewrite(
    "fuse_gated_linear",
    fuse_gated_linear,
    requires=frozenset({"merge_linears", "lower_swiglu", "fuse_quantize"}),
)
