"""Weights of the source graph: a linear and its quantisation -> recipes in canonical form."""

from collections.abc import Mapping
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
    Rows,
    TensorReader,
)
from trtc.builder.spec import (
    AttentionSpec,
    GatedDeltaSpec,
    GroupedRows,
    Interleaved,
    LatentAttentionSpec,
    LinearSpec,
    Mamba1Spec,
    Mamba2Spec,
    NormSpec,
    OfExperts,
    RecurrentSpec,
    ShortConvSpec,
)
from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.iq4 import values_of
from trtc.plugins.products import e8m0_values
from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.scheme import QuantizedLinear, TensorSource, WeightFormat

_SCALE_DTYPES: Mapping[WeightFormat, str] = {"f4e2m1": "f8e4m3", "mxfp4": "u8"}
"""Of the scales of groups; others are f32."""
CODES = {"iq4": "u4", "i6": "i8"}
"""Element types of codes, by weight formats that no element type has the name of."""
_ROWWISE = ("weight", "weight_scale", "weight_zero")


@dataclass(frozen=True)
class Tensor:
    """A weight that has no name in the graph yet."""

    recipe: Recipe
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LinearWeights:
    """One linear as the graph wants it; N out_features, K in_features, G groups of K.

    `scale` is () for a tensor, [N] for an output channel, [N, G] for groups.
    """

    weight: Tensor
    """[N, K]."""
    format: WeightFormat
    bias: Tensor | None = None
    """[N], in the activation type."""
    scale: Tensor | None = None
    zero: Tensor | None = None
    """As `scale`, u4."""
    scale_2: Tensor | None = None
    input_scale: Tensor | None = None
    pre_scale: Tensor | None = None
    """[K], in the activation type."""
    column_order: Tensor | None = None
    """[K] i32: the input channel that each column of the weight multiplies; None: its own."""
    group_size: int | None = None
    dynamic: bool = False
    """Whether the input's scales follow from it."""
    hadamard: int = 0
    """Channels of the input that a Hadamard matrix multiplies together before; 0: none."""

    @property
    def activation(self) -> str | None:
        """What the input is quantised to, if it is."""
        if self.input_scale is None and not self.dynamic:
            return None
        return self.format if self.format in ("i8", "f4e2m1") else "f8e4m3"

    @property
    def input_scales(self) -> int:
        """Scales that follow from a row of the input: one for each group, or for all of it."""
        return self.weight.shape[1] // self.group_size if self.group_size else 1


def source_recipe(source: TensorSource, linear: LinearSpec | None = None) -> Recipe:
    """A quantised checkpoint's tensor as a recipe; of a tensor of all experts, `linear`'s rows."""
    loads: tuple[Recipe, ...] = tuple(Load(name) for name in source.names)
    if linear is not None:
        loads = tuple(_of_expert(load, linear) for load in loads)
    return loads[0] if source.function is None else Apply(source.function, loads)


def norm_weight(norm: NormSpec, size: int, dtype: str) -> Tensor:
    """[size]; Gemma's 1 is added in f32, as the model does, before the weight is rounded."""
    if norm.weight is None:
        return _of_norm(Constant(np.ones(size, np.float32)), norm, size, dtype)
    recipe: Recipe = Load(norm.weight)
    if norm.unit_offset:
        recipe = Apply(_plus_one, (Cast(recipe, "f32"),))
    return _of_norm(recipe, norm, size, dtype)


def norm_bias(norm: NormSpec, size: int, dtype: str) -> Tensor | None:
    """[size], if there is one."""
    return None if norm.bias is None else _of_norm(Load(norm.bias), norm, size, dtype)


def _of_norm(recipe: Recipe, norm: NormSpec, size: int, dtype: str) -> Tensor:
    if norm.interleaved is not None:
        recipe = Apply(_Halves(norm.interleaved), (recipe,))
    if norm.multiplier != 1.0:
        recipe = Apply(_Times(norm.multiplier), (Cast(recipe, "f32"),))
    return Tensor(Cast(recipe, dtype), dtype, (size,))


def _plus_one(weight: Array) -> Array:
    return weight + np.float32(1)


@dataclass(frozen=True)
class _Times:
    factor: float

    def __call__(self, weight: Array) -> Array:
        return weight * np.float32(self.factor)


def layer_scalar(name: str, dtype: str) -> Tensor:
    """()."""
    return Tensor(Reshape(Cast(Load(name), dtype), ()), dtype, ())


def attention_sinks(attention: AttentionSpec, dtype: str) -> Tensor | None:
    """[num_heads] in f32, rounded to `dtype` first; None: there are none."""
    if attention.sinks is None:
        return None
    recipe = Cast(Load(attention.sinks), dtype)
    return Tensor(Cast(recipe, "f32"), "f32", (attention.num_heads,))


def conv_weight(conv: RecurrentSpec, dtype: str) -> Tensor:
    """[taps, channels] in f32, rounded to `dtype` first: the weights of the oldest input first."""
    if isinstance(conv, GatedDeltaSpec):
        names = tuple(name for name, _ in conv.convolutions)
    else:
        names = (conv.conv,)
    loads = tuple(Load(f"{name}.weight") for name in names)
    recipe = Cast(loads[0] if len(loads) == 1 else Concat(loads), dtype)
    return Tensor(Cast(Apply(_by_tap, (recipe,)), "f32"), "f32", (conv.taps, conv.channels))


def conv_bias(conv: ShortConvSpec | Mamba1Spec | Mamba2Spec, dtype: str) -> Tensor:
    """[channels] in f32, rounded to `dtype` first."""
    recipe = Cast(Load(f"{conv.conv}.bias"), dtype)
    return Tensor(Cast(recipe, "f32"), "f32", (conv.channels,))


def _by_tap(weight: Array) -> Array:
    """[H, 1, taps] -> [taps, H]."""
    return np.ascontiguousarray(weight[:, 0, :].T)


def absorbed_weights(
    spec: LatentAttentionSpec, quantized: Mapping[str, QuantizedLinear], dtype: str
) -> tuple[Tensor, Tensor]:
    """What kv_b makes keys and values by, as what multiplies queries and results instead: [Hq,
    rank, nope_dim], and [Hq, value_dim, rank]. Quantised ones are dequantised.

    Raises:
        UnsupportedError: they are quantised in a format that is not dequantised.
    """
    heads, end = spec.num_heads, spec.nope_dim + spec.value_dim
    whole: Recipe = Load(f"{spec.kv_b.name}.weight")
    if spec.kv_b.name in quantized:
        whole = _dequantized(spec.kv_b, quantized[spec.kv_b.name])
    whole = Cast(whole, dtype)
    keys = _RowsOfHeads(heads, 0, spec.nope_dim, transposed=True)
    values = _RowsOfHeads(heads, spec.nope_dim, end, transposed=False)
    return (
        Tensor(Apply(keys, (whole,)), dtype, (heads, spec.rank, spec.nope_dim)),
        Tensor(Apply(values, (whole,)), dtype, (heads, spec.value_dim, spec.rank)),
    )


def _dequantized(linear: LinearSpec, quantized: QuantizedLinear) -> Recipe:
    """[N, K] f32. Scales of activations are left out: the product takes them as they are."""
    scales = ("weight_scale", "weight_zero", "weight_scale_2")
    known = ("weight", *scales, "column_order", "pre_quant_scale")
    names = tuple(name for name in known if name in quantized.tensors)
    if quantized.weight == "i4_f8":
        raise UnsupportedError(
            "is quantised in the checkpoint, in a format that trtc does not dequantise",
            field=linear.name,
            remedy="Quantise again without kv_b_proj",
        )
    tensors = tuple(source_recipe(quantized.tensors[name]) for name in names)
    dequantize = _Dequantize(names, quantized.weight, quantized.hadamard)
    return Apply(dequantize, tensors)


@dataclass(frozen=True)
class _Dequantize:
    """scale_2 * scale * (weight - zero) * pre_quant_scale, in f32, with each column at its input
    channel."""

    names: tuple[str, ...]
    """Of the tensors that it is given, as QuantizedLinear has them."""
    format: WeightFormat
    hadamard: int = 0
    """As QuantizedLinear's."""

    def __call__(self, *tensors: Array) -> Array:
        named = dict(zip(self.names, tensors, strict=True))
        codes = named["weight"]
        weight = (values_of(codes) if self.format == "iq4" else codes).astype(np.float32)
        if "weight_zero" in named:
            weight = weight - _by_column(named["weight_zero"], weight)
        scale = named["weight_scale"]
        scale = e8m0_values(scale) if self.format == "mxfp4" else scale
        weight = weight * _by_column(scale, weight)
        if "weight_scale_2" in named:
            weight = weight * named["weight_scale_2"].astype(np.float32)
        weight = hadamard_product(weight, self.hadamard)
        if "column_order" in named:
            weight = weight[:, np.argsort(named["column_order"])]
        if "pre_quant_scale" in named:
            weight = weight * named["pre_quant_scale"].astype(np.float32)
        return weight


def _by_column(of_groups: Array, weight: Array) -> Array:
    """[N or 1, K] f32 of [N, G] or [1, 1], a column for each group."""
    groups = of_groups.astype(np.float32).reshape(-1, of_groups.shape[-1])
    return np.repeat(groups, weight.shape[1] // groups.shape[1], axis=1)


@dataclass(frozen=True)
class _RowsOfHeads:
    """Rows [begin, end) of every head of a tensor, as one matrix a head."""

    num_heads: int
    begin: int
    end: int
    transposed: bool

    def __call__(self, weight: Array) -> Array:
        heads = weight.reshape(self.num_heads, -1, weight.shape[1])[:, self.begin : self.end]
        return np.ascontiguousarray(heads.swapaxes(1, 2) if self.transposed else heads)


def decay_rate(a_log: str, heads: int, stored: tuple[int, ...] = ()) -> Tensor:
    """[heads] in f32: -exp(a_log), which multiplies softplus(a + dt_bias). `stored` is the tensor's
    shape where it is not [heads]."""
    recipe: Recipe = Load(a_log)
    if stored:
        recipe = Reshape(recipe, (heads,))
    return Tensor(Apply(_minus_exp, (Cast(recipe, "f32"),)), "f32", (heads,))


def scan_rate(mamba: Mamba1Spec) -> Tensor:
    """[state_size, channels] in f32: -exp(a_log), which multiplies the steps."""
    recipe = Apply(_minus_exp_transposed, (Cast(Load(mamba.a_log), "f32"),))
    return Tensor(recipe, "f32", (mamba.state_size, mamba.channels))


def of_heads(name: str, heads: int) -> Tensor:
    """[heads] in f32: a number of each head, such as dt_bias."""
    return Tensor(Cast(Load(name), "f32"), "f32", (heads,))


def _minus_exp(a_log: Array) -> Array:
    return -np.exp(a_log)


def _minus_exp_transposed(a_log: Array) -> Array:
    return np.ascontiguousarray(_minus_exp(a_log).T)


def plain_linear(linear: LinearSpec, dtype: str) -> LinearWeights:
    """An unquantised linear, rounded to `dtype`."""
    shape = (linear.out_features, linear.in_features)
    transposed = linear.of_experts is not None and linear.of_experts.transposed
    stored = _of_expert(Load(linear.weight_name), linear, transposed=transposed)
    recipe = Cast(_rows(stored, linear), dtype)
    weight_format: WeightFormat = "f32" if dtype == "f32" else "bf16"
    return LinearWeights(Tensor(recipe, dtype, shape), weight_format, bias=_bias(linear, dtype))


def quantized_linear(
    linear: LinearSpec, quantized: QuantizedLinear, dtype: str, reader: TensorReader
) -> LinearWeights:
    """A quantised linear; `reader` is asked for the shape of ungrouped scales and the order of
    columns, nothing else.

    Raises:
        UnsupportedError: the groups, or blocks, do not divide the input channels.
        CheckpointError: a scale's shape does not fit, or groups have other sizes than they say.
    """
    n, k = linear.out_features, linear.in_features
    group = quantized.group_size
    if group is not None and k % group:
        raise UnsupportedError(
            f"groups of {group} do not divide its {k} input channels",
            field=linear.name,
            remedy="Use a scheme without groups, such as fp8 or int8_sq",
        )
    if quantized.hadamard and k % quantized.hadamard:
        raise UnsupportedError(
            f"blocks of {quantized.hadamard} do not divide its {k} input channels",
            field=linear.name,
            remedy="Use a scheme without Hadamard matrices, such as int8_dynamic",
        )
    tensors = {key: _canonical(key, source, linear) for key, source in quantized.tensors.items()}
    scale_shape = (n, k // group) if group else _ungrouped_shape(linear, tensors, reader)

    def tensor(key: str, element: str, shape: tuple[int, ...]) -> Tensor | None:
        if key not in tensors:
            return None
        return Tensor(Reshape(Cast(tensors[key], element), shape), element, shape)

    assert not {"pre_quant_scale", "column_order"} <= tensors.keys(), "no format has both"
    weight = tensor("weight", _weight_dtype(quantized), (n, k))
    assert weight is not None, f"{linear.name}: a quantised linear has a weight"
    return LinearWeights(
        weight=weight,
        format=quantized.weight,
        bias=_bias(linear, dtype),
        scale=tensor("weight_scale", _SCALE_DTYPES.get(quantized.weight, "f32"), scale_shape),
        zero=tensor("weight_zero", "u4", scale_shape),
        scale_2=tensor("weight_scale_2", "f32", ()),
        input_scale=tensor("input_scale", "f32", ()),
        pre_scale=tensor("pre_quant_scale", dtype, (k,)),
        column_order=_column_order(tensors, reader),
        group_size=group,
        dynamic=quantized.dynamic,
        hadamard=quantized.hadamard,
    )


def _column_order(tensors: Mapping[str, Recipe], reader: TensorReader) -> Tensor | None:
    """Most linears have their columns in order, and only the checkpoint knows."""
    if "column_order" not in tensors:
        return None
    order = tensors["column_order"].load(reader)
    if np.array_equal(order, np.arange(len(order))):
        return None
    return Tensor(Constant(order), "i32", order.shape)


def rows_in_order(weights: LinearWeights, order: Tensor) -> LinearWeights:
    """A linear that gives its output channels in another order.

    Args:
        order: [N] i32, as a linear that reads them has it for its columns.
    """

    def rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.shape:
            return tensor
        return replace(tensor, recipe=Apply(_rows_in_order, (tensor.recipe, order.recipe)))

    weight = rows(weights.weight)
    assert weight is not None
    return replace(
        weights,
        weight=weight,
        bias=rows(weights.bias),
        scale=rows(weights.scale),
        zero=rows(weights.zero),
    )


def _rows_in_order(values: Array, order: Array) -> Array:
    return values[order]


def linear_weights(
    linear: LinearSpec,
    quantized: Mapping[str, QuantizedLinear],
    dtype: str,
    reader: TensorReader,
) -> LinearWeights:
    """Quantised if the checkpoint says so, else as it is; see the two functions above."""
    if linear.name in quantized:
        return quantized_linear(linear, quantized[linear.name], dtype, reader)
    return plain_linear(linear, dtype)


def _canonical(key: str, source: TensorSource, linear: LinearSpec) -> Recipe:
    if linear.of_experts is not None:
        return _in_halves(source_recipe(source, linear), linear)
    recipe = source_recipe(source)
    if key not in _ROWWISE:
        return recipe
    if linear.rows is not None:
        recipe = Apply(_RowsOfMany(*linear.rows), (recipe,))
    return _in_halves(_of_groups(recipe, linear), linear)


@dataclass(frozen=True)
class _RowsOfMany:
    """Rows of a tensor, or the one row that all of them share."""

    begin: int
    end: int

    def __call__(self, values: Array) -> Array:
        return values if values.shape[0] == 1 else values[self.begin : self.end]


def _of_expert(recipe: Recipe, linear: LinearSpec, *, transposed: bool = False) -> Recipe:
    """The linear's rows of a tensor [E, rows, ...] of all experts."""
    place = linear.of_experts
    if place is None:
        return recipe
    return Apply(_OfExpert(place, linear.out_features, transposed), (recipe,))


@dataclass(frozen=True)
class _OfExpert:
    place: OfExperts
    count: int
    transposed: bool
    """The tensor is [E, columns, rows]."""

    def __call__(self, values: Array) -> Array:
        mine = values[self.place.expert]
        rows: Array = mine.T if self.transposed else mine
        return rows[self.place.first :: self.place.step][: self.count]


def _rows(recipe: Recipe, linear: LinearSpec) -> Recipe:
    recipe = recipe if linear.rows is None else Rows(recipe, *linear.rows)
    return _in_halves(_of_groups(recipe, linear), linear)


def _of_groups(recipe: Recipe, linear: LinearSpec) -> Recipe:
    """The rows that `GroupedRows` takes."""
    return recipe if linear.grouped is None else Apply(_Grouped(linear.grouped), (recipe,))


@dataclass(frozen=True)
class _Grouped:
    grouped: GroupedRows

    def __call__(self, values: Array) -> Array:
        """Parts of every group of rows; a row that all of them share stays."""
        if values.ndim == 0 or values.shape[0] == 1:
            return values
        groups = values.reshape(-1, self.grouped.group, *values.shape[1:])
        parts = [
            groups[:, begin:end].reshape(-1, *values.shape[1:]) for begin, end in self.grouped.parts
        ]
        return np.concatenate(parts)


def _in_halves(recipe: Recipe, linear: LinearSpec) -> Recipe:
    """Rows of interleaved heads in the order of halves; see `Interleaved`."""
    pairs = linear.interleaved
    return recipe if pairs is None else Apply(_Halves(pairs), (recipe,))


@dataclass(frozen=True)
class _Halves:
    pairs: Interleaved

    def __call__(self, values: Array) -> Array:
        """Reorder the rows of every head; a row that all of them share stays."""
        if values.ndim == 0 or values.shape[0] == 1:
            return values
        head, first = self.pairs.head_dim, self.pairs.first
        end = first + self.pairs.rotary_dim
        order = np.concatenate(
            (
                np.arange(first),
                np.arange(first, end, 2),
                np.arange(first + 1, end, 2),
                np.arange(end, head),
            )
        )
        heads = values.reshape(-1, head, *values.shape[1:])
        return np.ascontiguousarray(heads[:, order]).reshape(values.shape)


def _bias(linear: LinearSpec, dtype: str) -> Tensor | None:
    if not linear.has_bias:
        return None
    recipe = Cast(_rows(_of_expert(Load(linear.bias_name), linear), linear), dtype)
    return Tensor(recipe, dtype, (linear.out_features,))


def _ungrouped_shape(
    linear: LinearSpec, tensors: Mapping[str, Recipe], reader: TensorReader
) -> tuple[int, ...]:
    """() when the whole tensor has one scale, [N] when every output channel has its own."""
    size = tensors["weight_scale"].load(reader).size
    if size == 1:
        return ()
    if size == linear.out_features:
        return (linear.out_features,)
    raise CheckpointError(
        f"has {size} scales for {linear.out_features} output channels",
        field=f"{linear.name}.weight_scale",
        remedy="Quantise the checkpoint again",
    )


def _weight_dtype(quantized: QuantizedLinear) -> str:
    if quantized.weight in CODES:
        return CODES[quantized.weight]
    if quantized.weight in ("i4", "i4_f8"):
        return "u4" if quantized.has_zero_point else "i4"
    return "f4e2m1" if quantized.weight == "mxfp4" else quantized.weight
