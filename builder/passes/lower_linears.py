"""Matrix products with weights, and what surrounds them, as trtc.quantize and trtc.linear."""

from dataclasses import dataclass

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import (
    Node,
    Tensor,
    dtype_of,
    is_fused,
    is_weight,
    output_of,
    producer,
    site_of,
)
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.recipes import Cast
from trtc.builder.transforms import E4m3Bits, ScalePerRow, UnitPerRow, ZeroPerRow
from trtc.plugins.iq4 import VALUES
from trtc.plugins.products import E8M0_BIAS
from trtc.plugins.six_bits import LEAST, MOST

_LEGAL = {
    "f32": ("f32",),
    "bf16": ("bf16", "f8e4m3", "f4e2m1", "i8", "i6", "i4", "u4", "iq4"),
    "f8e4m3": ("f8e4m3",),
    "i8": ("i8",),
}
"""Element types of x -> those of the weights that it can be multiplied with."""


@dataclass(frozen=True)
class _Input:
    """The activation side of a product: x * pre_scale / input_scale in `dtype`, or by `scales`."""

    x: Tensor
    dtype: str
    pre_scale: Tensor | None = None
    input_scale: Tensor | None = None
    scales: int = 0
    """Of a row, which follow from it."""
    hadamard: int = 0
    """Channels of a row that are multiplied by a Hadamard matrix before."""


@dataclass(frozen=True)
class _Weight:
    """The weight side, [N, K]: the initialiser and its scales as the source graph has them."""

    weight: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    group_size: int = 0
    codes: str = ""
    """What the initialiser's codes are where its type does not say it: iq4 or i6."""
    unit: Tensor | None = None
    """What scales of groups that are E4M3 are multiplied with."""

    @property
    def dtype(self) -> str:
        return self.codes or dtype_of(self.weight)


@dataclass(frozen=True)
class _Epilogue:
    """What follows a product: the last node absorbed gives the output."""

    last: Node
    bias: Tensor | None = None
    softcap: float = 0.0


def lower_linears(rewriter: Rewriter) -> bool:
    """Lower every MatMul of an activation and a transposed weight.

    Rules, for y = MatMul(a, Transpose(w)):
        w: an initialiser [N, K], or DequantizeLinear(initialiser, scale[, zero]) with one scale a
           tensor, a row or a group of K; scales become weight_scale [N, G] f32
           the same of Gather(VALUES of plugins/iq4.py, Cast(initialiser u4)), in groups of K
        the same of Clip(initialiser i8, LEAST, MOST of plugins/six_bits.py), in groups of K
        the same of an initialiser f4e2m1 by scales of groups of K that are bytes, weight_scale
           [N, G] u8: Pow(2, Cast(scale u8) - 127), or DequantizeLinear(scale f8e4m3, unit), of
           which the unit becomes scale_unit [N]
        both widened from bf16 to f32 (routers): the bf16 tensors, out_dtype f32
        a: x, Mul(x, pre_scale[K]), and either of them through QuantizeLinear/DequantizeLinear
           with one scale -> trtc.quantize, whose output the linear reads, and input_scale
           the same through trtc.quantize/DequantizeLinear by scales of rows -> its codes are what
           the linear reads, and row_scale
        y: Add(y, bias[N]) -> bias; Cast(y, f32) that gives the graph's output, and
           c * Tanh(y / c) in f32, cast or not -> out_dtype, softcap
    A product of element types that no kernel multiplies is left alone.
    """
    changed = False
    for matmul in rewriter.nodes("MatMul"):
        weight = _match_weight(rewriter, matmul.inputs[1])
        if weight is None or len(matmul.inputs[0].shape) != 2:
            continue
        given = _match_input(rewriter, matmul.inputs[0])
        given, weight = _narrowed(rewriter, given, weight)
        if weight.dtype in _LEGAL.get(given.dtype, ()):
            _lower(rewriter, matmul, given, weight)
            changed = True
    return changed


def _narrowed(rewriter: Rewriter, given: _Input, weight: _Weight) -> tuple[_Input, _Weight]:
    """bf16 operands that were widened to be multiplied in f32, which kernels do anyway."""
    widened = producer(given.x, "Cast")
    is_plain = given.pre_scale is None and given.input_scale is None and weight.scale is None
    if widened is None or not is_plain or dtype_of(widened.inputs[0]) != "bf16":
        return given, weight
    recipe = rewriter.recipes[weight.weight.name]
    if not (isinstance(recipe, Cast) and isinstance(recipe.source, Cast)):
        return given, weight
    if (recipe.dtype, recipe.source.dtype) != ("f32", "bf16"):
        return given, weight
    narrow = rewriter.as_type(weight.weight, "bf16")
    return _Input(widened.inputs[0], "bf16"), _Weight(narrow)


def _match_weight(rewriter: Rewriter, tensor: Tensor) -> _Weight | None:
    transpose = producer(tensor, "Transpose")
    if transpose is None or list(transpose.attrs.get("perm", [1, 0])) != [1, 0]:
        return None
    source = transpose.inputs[0]
    if is_weight(source):
        return _Weight(source) if len(source.shape) == 2 else None
    dequantize = producer(source, "DequantizeLinear")
    if dequantize is None:
        return None
    weight, scale, *rest = dequantize.inputs
    weight, codes = _match_codes(rewriter, weight)
    scale, unit = _match_bytes(rewriter, scale) if dtype_of(weight) == "f4e2m1" else (scale, None)
    if not all(is_weight(item) for item in (weight, scale, *rest)):
        return None
    axis = dequantize.attrs.get("axis", 1)
    group_size = dequantize.attrs.get("block_size", 0)
    is_per_tensor = scale.shape in ([], [1], (), (1,))
    is_per_row = len(scale.shape) == 1 and axis in (0, -2)
    is_grouped = len(scale.shape) == 2 and axis in (1, -1) and group_size > 0
    if not (is_grouped or (not codes and (is_per_tensor or is_per_row))):
        return None
    zero = rest[0] if rest else None
    return _Weight(weight, scale, zero, group_size if is_grouped else 0, codes, unit)


def _match_bytes(rewriter: Rewriter, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """E4M3 scales of groups and their unit, or exponents; the tensor itself, if it is neither."""
    dequantize = producer(tensor, "DequantizeLinear")
    if dequantize is None:
        return _match_exponents(rewriter, tensor) or tensor, None
    scale, unit, *zero = dequantize.inputs
    is_ours = dtype_of(scale) == "f8e4m3" and len(unit.shape) == 0 and is_weight(unit) and not zero
    return (scale, unit) if is_ours and dtype_of(tensor) == "f32" else (tensor, None)


def _match_exponents(rewriter: Rewriter, tensor: Tensor) -> Tensor | None:
    """The E8M0 numbers, u8, of Pow(2, Cast(numbers) - 127); None: it is something else."""
    power = producer(tensor, "Pow")
    subtract = producer(power.inputs[1], "Sub") if power is not None else None
    cast = producer(subtract.inputs[0], "Cast") if subtract is not None else None
    if power is None or subtract is None or cast is None or dtype_of(cast.inputs[0]) != "u8":
        return None
    constants = (rewriter.scalar(power.inputs[0]), rewriter.scalar(subtract.inputs[1]))
    return cast.inputs[0] if constants == (2, E8M0_BIAS) else None


def _match_codes(rewriter: Rewriter, tensor: Tensor) -> tuple[Tensor, str]:
    """The initialiser of codes, and what they are if its type does not say it."""
    codes = _match_iq4(rewriter, tensor)
    if codes is not None:
        return codes, "iq4"
    clip = producer(tensor, "Clip")
    if clip is not None and [rewriter.scalar(one) for one in clip.inputs[1:]] == [LEAST, MOST]:
        return clip.inputs[0], "i6"
    return tensor, ""


def _match_iq4(rewriter: Rewriter, tensor: Tensor) -> Tensor | None:
    """The codes of Gather(VALUES, Cast(codes)); None: it is something else."""
    gather = producer(tensor, "Gather")
    cast = producer(gather.inputs[1], "Cast") if gather is not None else None
    if gather is None or cast is None or dtype_of(cast.inputs[0]) != "u4":
        return None
    table = rewriter.value(gather.inputs[0])
    is_ours = table is not None and tuple(table.reshape(-1).tolist()) == VALUES
    return cast.inputs[0] if is_ours else None


def _match_input(rewriter: Rewriter, tensor: Tensor) -> _Input:
    by_rows = _match_dynamic_quantization(tensor)
    quantized = _match_static_quantization(rewriter, tensor)
    source, dtype, scale = quantized or (tensor, dtype_of(tensor), None)
    scales = hadamard = 0
    if by_rows is not None:
        source, dtype = by_rows.inputs[0], dtype_of(by_rows.outputs[0])
        scales, hadamard = (int(by_rows.attrs.get(name, 0)) for name in ("scales", "hadamard"))
    multiply = producer(source, "Mul")
    if multiply is not None:
        for x, factor in (multiply.inputs, reversed(multiply.inputs)):
            if is_weight(factor) and not is_weight(x) and list(factor.shape) == [x.shape[-1]]:
                return _Input(x, dtype, rewriter.as_type(factor, "f32"), scale, scales, hadamard)
    return _Input(source, dtype, None, scale, scales, hadamard)


def _match_dynamic_quantization(tensor: Tensor) -> Node | None:
    """The trtc.quantize(x; scales) of DequantizeLinear(trtc.quantize(x; scales))."""
    dequantize = producer(tensor, "DequantizeLinear")
    quantize = producer(dequantize.inputs[0]) if dequantize else None
    if quantize is None or not is_fused(quantize, "quantize"):
        return None
    assert dequantize is not None and dequantize.inputs[1] is output_of(quantize, "row_scale")
    return quantize


def _match_static_quantization(
    rewriter: Rewriter, tensor: Tensor
) -> tuple[Tensor, str, Tensor] | None:
    """(x, element type, scale) of DequantizeLinear(QuantizeLinear(x, scale), scale)."""
    dequantize = producer(tensor, "DequantizeLinear")
    quantize = producer(dequantize.inputs[0], "QuantizeLinear") if dequantize else None
    if dequantize is None or quantize is None:
        return None
    scale = quantize.inputs[1]
    zeros = [node.inputs[2] for node in (quantize, dequantize) if len(node.inputs) > 2]
    is_symmetric = all(rewriter.scalar(zero) == 0 for zero in zeros)
    if not is_symmetric or not is_weight(scale) or len(scale.shape) != 0:
        return None
    if not rewriter.same_weight(scale, dequantize.inputs[1]):
        return None
    dtype = dtype_of(quantize.outputs[0])
    return (quantize.inputs[0], dtype, scale) if dtype in ("f8e4m3", "i8") else None


def _match_epilogue(rewriter: Rewriter, matmul: Node, num_columns: int) -> _Epilogue:
    last, bias = matmul, None
    after = rewriter.sole_consumer(last.outputs[0], "Add")
    if after is not None:
        for operand in after.inputs:
            if is_weight(operand) and list(operand.shape) == [num_columns]:
                last, bias = after, rewriter.as_type(operand, "f32")
    widened = rewriter.sole_consumer(last.outputs[0], "Cast")
    result = last.outputs[0] if widened is None else widened.outputs[0]
    if dtype_of(result) != "f32":
        return _Epilogue(last, bias)
    capped = _match_softcap(rewriter, result)
    if capped is not None:
        return _Epilogue(capped[0], bias, capped[1])
    # Other widened results (q and k before their rope) are rounded to bf16 on purpose.
    is_logits = widened is not None and rewriter.is_output(result)
    return _Epilogue(widened if is_logits else last, bias)


def _match_softcap(rewriter: Rewriter, tensor: Tensor) -> tuple[Node, float] | None:
    """(last node, c) of c * Tanh(tensor / c)."""
    divide = rewriter.sole_consumer(tensor, "Div")
    tanh = rewriter.sole_consumer(divide.outputs[0], "Tanh") if divide else None
    multiply = rewriter.sole_consumer(tanh.outputs[0], "Mul") if tanh else None
    if divide is None or multiply is None:
        return None
    cap = rewriter.scalar(divide.inputs[1])
    factors = [rewriter.scalar(factor) for factor in multiply.inputs]
    return (multiply, cap) if cap is not None and cap in factors else None


def _lower(rewriter: Rewriter, matmul: Node, given: _Input, weight: _Weight) -> None:
    site = site_of(matmul)
    num_columns = weight.weight.shape[0]
    epilogue = _match_epilogue(rewriter, matmul, num_columns)
    output = epilogue.last.outputs[0]
    x, row_scale = _quantized(rewriter, site, given)
    scale, unit = _scales(rewriter, weight, num_columns)
    rewriter.fused(
        "linear",
        site,
        inputs={
            "x": x,
            "weight": weight.weight,
            "weight_scale": scale,
            "weight_zero": _per_row(rewriter, weight.zero, num_columns, "u8"),
            "input_scale": given.input_scale,
            "bias": epilogue.bias,
            "row_scale": row_scale,
            "scale_unit": unit,
        },
        outputs={"out": output},
        attributes={
            "N": num_columns,
            "group_size": weight.group_size,
            "weight_dtype": weight.dtype,
            "layout": "row_major",
            "activation": "exact",
            "softcap": epilogue.softcap,
            "out_dtype": dtype_of(output),
        },
    )


def _quantized(rewriter: Rewriter, site: str, given: _Input) -> tuple[Tensor, Tensor | None]:
    """The tensor that the linear reads, which is x itself or what trtc.quantize makes of it, and
    the scales of its rows."""
    if given.pre_scale is None and given.input_scale is None and not given.scales:
        return given.x, None
    output = rewriter.variable(f"{site}.quantized", given.dtype, given.x.shape)
    outputs = {"out": output}
    if given.scales:
        shape = [given.x.shape[0], given.scales]
        outputs["row_scale"] = rewriter.variable(f"{site}.row_scale", "f32", shape)
    rewriter.fused(
        "quantize",
        f"{site}.quantize",
        inputs={"x": given.x, "pre_scale": given.pre_scale, "out_scale": given.input_scale},
        outputs=outputs,
        attributes={
            "out_dtype": given.dtype,
            "scales": given.scales,
            "hadamard": given.hadamard,
            "codes": "none",
        },
    )
    return output, outputs.get("row_scale")


def _per_row(rewriter: Rewriter, tensor: Tensor | None, rows: int, dtype: str) -> Tensor | None:
    if tensor is None:
        return None
    groups = tensor.shape[1] if len(tensor.shape) == 2 else 1
    transform = ScalePerRow(rows) if dtype == "f32" else ZeroPerRow(rows)
    return rewriter.derived(f"{tensor.name}.rows", transform, (tensor,), dtype, (rows, groups))


def _scales(rewriter: Rewriter, weight: _Weight, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """[N, G] f32 or bytes, and the unit [N] of bytes."""
    scale, unit = weight.scale, weight.unit
    if scale is None or (unit is None and dtype_of(scale) != "u8"):
        return _per_row(rewriter, scale, rows, "f32"), None
    if unit is None:
        return scale, None
    shape = tuple(scale.shape)
    bits = rewriter.derived(f"{scale.name}.bits", E4m3Bits(), (scale,), "u8", shape)
    units = rewriter.derived(f"{unit.name}.rows", UnitPerRow(rows), (unit,), "f32", (rows,))
    return bits, units


LOWER_LINEARS = Rewrite(
    "lower_linears", lower_linears, requires=frozenset({"fold_weight_quantization"})
)
