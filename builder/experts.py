"""Weights of routed experts: every expert's linears stacked into the tensors of trtc.moe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trtc.builder.recipes import (
    Apply,
    Array,
    Cast,
    Concat,
    Constant,
    Load,
    Recipe,
    Reshape,
    Stack,
    TensorReader,
)
from trtc.builder.spec import DenseMlpSpec, LinearSpec, MoeMlpSpec, RouterSpec
from trtc.builder.transforms import E4m3Bits, RequantizeToE4M3, UnitPerRow
from trtc.builder.weights import CODES, LinearWeights, Tensor, linear_weights, rows_in_order
from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.scheme import QuantizedLinear


@dataclass(frozen=True)
class ExpertWeights:
    """E experts; inputs of trtc.moe by name."""

    inputs: Mapping[str, Tensor | None]
    weight_dtype: str
    act_quant: str
    hadamard: int
    group_size: int


def expert_weights(
    mlp: MoeMlpSpec,
    quantized: Mapping[str, QuantizedLinear],
    dtype: str,
    reader: TensorReader,
) -> ExpertWeights:
    """Stack gate and up as [E, 2I, H], or up alone as [E, I, H], and down as [E, H, I], with their
    scales.

    4-bit weights under FP8 activations become the E4M3 weights that they are multiplied as.

    Raises:
        UnsupportedError: as `check_activations`, or an expert whose gate and up read its input in
            different orders.
        CheckpointError: experts quantised in different ways.
    """

    def weights(linear: LinearSpec) -> LinearWeights:
        found = linear_weights(linear, quantized, dtype, reader)
        return _as_e4m3(found, dtype) if found.format == "i4_f8" else found

    check_activations(mlp, quantized)
    downs = [weights(expert.down) for expert in mlp.experts]
    before = [
        tuple(_before(weights(one), down.column_order) for one in expert.linears[:-1])
        for expert, down in zip(mlp.experts, downs, strict=True)
    ]
    orders = [
        _input_order(expert, parts, reader)
        for expert, parts in zip(mlp.experts, before, strict=True)
    ]
    first = downs[0]
    _check_uniform(mlp, [*(one for parts in before for one in parts), *downs])
    gate_up = _Stacked(tuple(before))
    down = _Stacked(tuple((one,) for one in downs))
    return ExpertWeights(
        inputs={
            "gate_up": gate_up.rows(lambda w: w.weight),
            "down": down.rows(lambda w: w.weight),
            "gate_up_scale": _bytes(gate_up.groups(lambda w: w.scale)),
            "down_scale": _bytes(down.groups(lambda w: w.scale)),
            "gate_up_zero": _as(gate_up.groups(lambda w: w.zero), "u8"),
            "down_zero": _as(down.groups(lambda w: w.zero), "u8"),
            "gate_up_input_scale": gate_up.shared(lambda w: w.input_scale, _largest),
            "down_input_scale": down.shared(lambda w: w.input_scale, _largest),
            "gate_up_pre_scale": _as(gate_up.shared(lambda w: w.pre_scale, _equal), "f32"),
            "down_pre_scale": _as(down.shared(lambda w: w.pre_scale, _equal), "f32"),
            "gate_up_bias": _as(gate_up.by_row(lambda w: w.bias), "f32"),
            "down_bias": _as(down.by_row(lambda w: w.bias), "f32"),
            "gate_up_order": _stacked_orders(orders, first.weight.shape[0]),
            "gate_up_scale_unit": gate_up.by_row(_unit),
            "down_scale_unit": down.by_row(_unit),
        },
        weight_dtype=first.format if first.format in CODES else first.weight.dtype,
        act_quant=_act_quant(first),
        hadamard=first.hadamard,
        group_size=first.group_size or 0,
    )


def _before(weights: LinearWeights, order: Tensor | None) -> LinearWeights:
    """A linear that gives its channels in the order in which the one after it reads them."""
    return weights if order is None else rows_in_order(weights, order)


def _input_order(
    expert: DenseMlpSpec, before: tuple[LinearWeights, ...], reader: TensorReader
) -> Tensor | None:
    """In which order gate and up of an expert, which read one input, have its channels; None: as
    they come. Calibration finds it of the input, so theirs is one."""
    first, *others = (one.column_order for one in before)
    for linear, other in zip(expert.linears[1:-1], others, strict=True):
        if not _same_order(first, other, reader):
            raise UnsupportedError(
                "scatters its groups over the input features (act-order) in another order than the "
                "expert's gate",
                field=linear.name,
                remedy="Quantise the experts with desc_act false",
            )
    return first


def _same_order(left: Tensor | None, right: Tensor | None, reader: TensorReader) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left.recipe.load(reader), right.recipe.load(reader))


def _stacked_orders(orders: list[Tensor | None], width: int) -> Tensor | None:
    """[E, H]; None: no expert has an order of its own."""
    if all(order is None for order in orders):
        return None
    plain = Constant(np.arange(width, dtype=np.int32))
    recipes = tuple(plain if order is None else order.recipe for order in orders)
    return Tensor(Stack(recipes), "i32", (len(orders), width))


def _act_quant(linear: LinearWeights) -> str:
    if linear.activation is None:
        return "none"
    return f"dynamic_{linear.activation}" if linear.dynamic else linear.activation


def choice_bias(router: RouterSpec) -> Tensor | None:
    """[E] f32, whatever the activations are: they would round it to what chooses other experts."""
    if router.choice_bias is None:
        return None
    shape = (router.linear.out_features,)
    recipe = Reshape(Cast(Load(router.choice_bias.tensor), "f32"), shape)
    return Tensor(recipe, "f32", shape)


def expert_scale(router: RouterSpec, dtype: str) -> Tensor | None:
    """[E] f32, rounded to `dtype` first."""
    if router.expert_scale is None:
        return None
    shape = (router.linear.out_features,)
    return Tensor(Cast(Cast(Load(router.expert_scale), dtype), "f32"), "f32", shape)


def check_activations(mlp: MoeMlpSpec, quantized: Mapping[str, QuantizedLinear]) -> None:
    """Refuse FP4 weights with FP4 activations, which trtc.moe lacks.

    Raises:
        UnsupportedError: an expert has them.
    """
    for linear in (linear for expert in mlp.experts for linear in expert.linears):
        found = quantized.get(linear.name)
        if found and found.weight == "f4e2m1" and "input_scale" in found.tensors:
            raise UnsupportedError(
                "routed experts cannot have FP4 weights with FP4 activations",
                field=linear.name,
                remedy="Use int4, w4a8_awq or fp8 for models with routed experts",
            )


def _check_uniform(mlp: MoeMlpSpec, linears: list[LinearWeights]) -> None:
    kinds = {
        (one.format, one.weight.dtype, one.group_size, one.dynamic, one.hadamard) for one in linears
    }
    if len(kinds) > 1:
        raise CheckpointError(
            "the experts of one layer are quantised in different ways",
            field=mlp.experts[0].linears[0].name,
            remedy="Quantise all experts of the layer alike",
        )


def _as_e4m3(linear: LinearWeights, dtype: str) -> LinearWeights:
    """W4A8 with the weight that its QuantizeLinear would make, as fold_weight_quantization does."""
    parts = [linear.weight, linear.scale, linear.scale_2, linear.zero]
    recipes = tuple(part.recipe for part in parts if part is not None)
    weight = Apply(RequantizeToE4M3(through=dtype), recipes)
    return replace(
        linear,
        weight=Tensor(weight, "f8e4m3", linear.weight.shape),
        format="f8e4m3",
        scale=linear.scale_2,
        zero=None,
        scale_2=None,
        group_size=None,
    )


def _as(tensor: Tensor | None, dtype: str) -> Tensor | None:
    """trtc.moe takes zero points as u8 and every scale in f32."""
    return None if tensor is None else Tensor(Cast(tensor.recipe, dtype), dtype, tensor.shape)


def _bytes(scale: Tensor | None) -> Tensor | None:
    """trtc.moe takes E4M3 scales as bytes, in units."""
    if scale is None or scale.dtype != "f8e4m3":
        return scale
    return Tensor(Apply(E4m3Bits(), (scale.recipe,)), "u8", scale.shape)


def _unit(linear: LinearWeights) -> Tensor | None:
    """[N]: what E4M3 scales of its rows are multiplied with."""
    if linear.scale_2 is None:
        return None
    rows = linear.weight.shape[0]
    return Tensor(Apply(UnitPerRow(rows), (linear.scale_2.recipe,)), "f32", (rows,))


Pick = Callable[[LinearWeights], Tensor | None]


@dataclass(frozen=True)
class _Stacked:
    """For each expert, the linears whose rows are joined."""

    experts: tuple[tuple[LinearWeights, ...], ...]

    def rows(self, pick: Pick) -> Tensor | None:
        """[E, sum of N, K]."""
        return self._join(pick, lambda linear, tensor: tensor)

    def groups(self, pick: Pick) -> Tensor | None:
        """[E, sum of N, G]; one scale a tensor becomes one a row."""

        def columns(linear: LinearWeights, tensor: Tensor) -> Tensor:
            n = linear.weight.shape[0]
            if len(tensor.shape) == 2:
                return tensor
            spread = Apply(_Spread(n), (tensor.recipe,))
            return Tensor(spread, tensor.dtype, (n, 1))

        return self._join(pick, columns)

    def by_row(self, pick: Pick) -> Tensor | None:
        """[E, sum of N]."""
        stacked: list[Recipe] = []
        for linears in self.experts:
            tensors = [tensor for tensor in map(pick, linears) if tensor is not None]
            if len(tensors) < len(linears):
                return None
            stacked.append(Concat(tuple(tensor.recipe for tensor in tensors)))
        rows = sum(tensor.shape[0] for tensor in tensors)
        return Tensor(Stack(tuple(stacked)), tensors[0].dtype, (len(stacked), rows))

    def shared(self, pick: Pick, merge: Callable[..., Array]) -> Tensor | None:
        """[E, ...]: one value for the linears of an expert, which share their input."""
        merged: list[Recipe] = []
        for linears in self.experts:
            tensors = [pick(linear) for linear in linears]
            present = [tensor for tensor in tensors if tensor is not None]
            if len(present) < len(tensors):
                return None
            shape, dtype = present[0].shape, present[0].dtype
            merged.append(Apply(merge, tuple(tensor.recipe for tensor in present)))
        return Tensor(Stack(tuple(merged)), dtype, (len(merged), *shape))

    def _join(
        self, pick: Pick, shape_of: Callable[[LinearWeights, Tensor], Tensor]
    ) -> Tensor | None:
        stacked: list[Recipe] = []
        for linears in self.experts:
            picked = [(linear, pick(linear)) for linear in linears]
            tensors = [shape_of(one, tensor) for one, tensor in picked if tensor is not None]
            if len(tensors) < len(picked):
                return None
            stacked.append(Concat(tuple(tensor.recipe for tensor in tensors)))
        rows = sum(tensor.shape[0] for tensor in tensors)
        return Tensor(
            Stack(tuple(stacked)), tensors[0].dtype, (len(stacked), rows, tensors[0].shape[1])
        )


@dataclass(frozen=True)
class _Spread:
    """One value, or one a row -> [rows, 1]."""

    rows: int

    def __call__(self, values: Array) -> Array:
        return np.broadcast_to(values.reshape(-1, 1), (self.rows, 1))


def _largest(*values: Array) -> Array:
    """Linears with one input quantise it once: by the scale that clips nothing."""
    largest: Array = np.maximum.reduce(values)
    return largest


def _equal(*values: Array) -> Array:
    if any(not np.array_equal(values[0], other) for other in values[1:]):
        raise CheckpointError(
            "gate and up of an expert have different pre_quant_scales",
            field="pre_quant_scale",
            remedy="Quantise the checkpoint with one scale for both",
        )
    return values[0]
