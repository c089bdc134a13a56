"""compressed-tensors checkpoints (llm-compressor): groups of linears with settings of their own.

    format            weight                             scales and zero points
    pack-quantized    weight_packed i32 [N, K*bits/32]   weight_scale [N, G], and if asymmetric
                      codes less 2^(bits-1)              weight_zero_point i32 [N*bits/32, G]
    int-quantized     weight i8 [N, K]                   weight_scale [1], [N, 1] or [N, G]
    float-quantized   weight F8_E4M3 [N, K]              weight_scale [1], [N, 1] or [N/b, K/b]
    mxfp8-quantized   weight F8_E4M3 [N, K]              weight_scale u8 [N, K/32], E8M0
    mxfp4-pack-quantized
                      weight_packed u8 [N, K/2]          weight_scale u8 [N, K/32], E8M0
    nvfp4-pack-quantized
                      weight_packed u8 [N, K/2]          weight_scale F8_E4M3 [N, K/16],
                                                         weight_global_scale f32 [1]
    iq4-packed        weight_packed i32 [N, K/8]         weight_scale u8 [N, G], and
                      codes of plugins/iq4.py            weight_scale_2 f32 []

Groups that `actorder: group` scatters over the columns add weight_g_idx i32 [K], which says the
group of each. The last format is trtc's own, for what its builds calibrate and read again. Static
activations add input_scale [1]. Dynamic ones, by token, or by token and group where weights have
blocks, are quantised so where they are of the type of the weights and these have no groups. A
transform_config may rotate int8 ones before that (quant/formats/transforms.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import ml_dtypes
import numpy as np

from trtc.plugins.iq4 import GROUPS, scales_of
from trtc.plugins.six_bits import UNIT
from trtc.protos.errors import CheckpointError
from trtc.quant.formats import mxfp4, nvfp4
from trtc.quant.formats.fp4 import is_expert
from trtc.quant.formats.group_order import order_of_groups
from trtc.quant.formats.listed import ALL_LINEARS, ListedModules
from trtc.quant.formats.stored import (
    Array,
    StoredTensors,
    as_f32,
    block_scale,
    block_size,
    expect,
    mapping,
    num_groups,
    positive_size,
    unsupported,
)
from trtc.quant.formats.transforms import TRANSFORMS, read_rotations
from trtc.quant.pack import offset_bytes, offset_nibbles, offset_sixes, unpack_words
from trtc.quant.scheme import (
    DYNAMIC_NOTE,
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    Scheme,
    TensorSource,
    WeightFormat,
    mixed,
)

IQ4_PACKED = "iq4-packed"
_MXFP4, _MXFP8, _NVFP4 = "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *(_MXFP4, _MXFP8, _NVFP4, IQ4_PACKED),
)
_FP4: Mapping[str, tuple[WeightFormat, str, int]] = {
    _MXFP4: ("mxfp4", "group", mxfp4.GROUP),
    _NVFP4: ("f4e2m1", "tensor_group", nvfp4.GROUP),
}
"""Format -> the weights', and the strategy and the group size that it has."""
_INTEGERS: Mapping[int, WeightFormat] = {4: "i4", 6: "i6", 8: "i8"}
"""By width."""
_SIX_BIT_GROUPS = UNIT
_MAX_GROUPS = 64
_ROTATED = "int8_hadamard"
"""The scheme of linears whose activations are rotated."""
_IN_ORDER, _SCATTERED = (None, False, "weight", "static"), (True, "group", "dynamic")
"""Spellings of `actorder`: calibration leaves the groups in order, or scatters them."""
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class _Weights:
    """The weights' settings of a config group."""

    packed: bool
    weight: WeightFormat
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    has_exponents: bool = False
    """Whether scales are E8M0."""
    scattered: bool = False
    """Whether weight_g_idx says the group of each column."""


@dataclass(frozen=True)
class _Group:
    """Linears with settings of their own."""

    targets: ListedModules | None
    """None: all linears."""
    weights: _Weights
    activations: "_Activations"


_Activations = Literal["none", "static", "dynamic", "exact"]
"""exact: the checkpoint says dynamic, in a way that trtc does not multiply; they stay bf16."""


def read_compressed_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    """Read a `quantization_config` whose `quant_method` is compressed-tensors.

    Raises:
        UnsupportedError: a format or setting that trtc does not read; it is named.
        CheckpointError: tensors that are missing or contradict the config.
    """
    _refuse_extras(config)
    groups = _groups(config)
    rotations = read_rotations(config)
    kv_dtype = _kv_dtype(mapping(config, "kv_cache_scheme"))
    stored = StoredTensors(tensors)
    ignored = ListedModules(config, "ignore")
    linears, schemes = {}, dict[Scheme, None]()
    notes = [DYNAMIC_NOTE] if any(group.activations == "exact" for group in groups) else []
    for prefix in _prefixes(stored, groups):
        ignored.check(prefix)
        group = _group_of(prefix, groups)
        linear = _linear(stored, prefix, group.weights, group.activations)
        linears[prefix] = _rotated(prefix, linear, rotations.block_of(prefix))
        schemes[_scheme(group, prefix, linears[prefix].hadamard)] = None
    for prefix in stored.prefixes("weight"):
        if prefix not in linears and ignored.names(prefix) and rotations.block_of(prefix):
            raise unsupported(TRANSFORMS, prefix, "rotations of quantised linears alone")
    return CheckpointQuantization(
        source="compressed-tensors",
        scheme=mixed(list(schemes) or [_scheme(one, "") for one in groups]),
        linears=linears,
        kv_scales=stored.kv_scales() if kv_dtype else {},
        kv_dtype=kv_dtype,
        notes=tuple(notes),
    )


def _refuse_extras(config: Mapping[str, Any]) -> None:
    sparsity = mapping(config, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise unsupported("sparsity_config.format", sparsity["format"], "dense weights")


def _groups(config: Mapping[str, Any]) -> tuple[_Group, ...]:
    """The groups of settings; one where all are alike."""
    named = mapping(config, "config_groups")
    declared = [mapping(named, name, "config_groups.") for name in named]
    settings = [{k: v for k, v in group.items() if k != "targets"} for group in declared]
    if not 0 < len(settings) <= _MAX_GROUPS:
        raise unsupported("config_groups", sorted(named)[:4], f"1 to {_MAX_GROUPS} groups")
    if all(other == settings[0] for other in settings):
        return (_group(config, settings[0], None),)
    groups = tuple(
        _group(config, one, ListedModules(group, "targets"))
        for one, group in zip(settings, declared, strict=True)
    )
    if any(group.activations == "static" for group in groups):
        raise unsupported("input_activations", "static", "none, where groups differ")
    return groups


def _group(
    config: Mapping[str, Any], settings: Mapping[str, Any], targets: ListedModules | None
) -> _Group:
    if settings.get("output_activations"):
        raise unsupported("output_activations", settings["output_activations"], "none")
    name = expect({"format": settings.get("format") or config.get("format")}, "format", *_FORMATS)
    weights = _weights(name, mapping(settings, "weights"))
    activations = _activations(mapping(settings, "input_activations"), weights)
    return _Group(targets, weights, activations)


def _prefixes(stored: StoredTensors, groups: Sequence[_Group]) -> list[str]:
    """Of the linears that are quantised."""
    found: dict[str, None] = {}
    for group in groups:
        name = "weight_packed" if group.weights.packed else "weight_scale"
        found |= dict.fromkeys(stored.prefixes(name))
    return list(found)


def _group_of(prefix: str, groups: Sequence[_Group]) -> _Group:
    """The group that names a linear, or else the one of all linears."""
    for group in groups:
        if group.targets is None or group.targets.names(prefix):
            return group
    for group in groups:
        if group.targets is not None and group.targets.names(ALL_LINEARS):
            return group
    raise CheckpointError(
        "is quantised in the weights, but no config group names it",
        field=prefix,
        remedy="Config and weights are not of one export: download or export both again",
    )


def _weights(name: str, declared: Mapping[str, Any]) -> _Weights:
    if not declared:
        raise unsupported("weights", declared, "quantised weights")
    if name in _FP4:
        return _fp4_weights(name, declared)
    kind = expect(declared, "type", "int", "float", default="int")
    bits = expect(declared, "num_bits", *_INTEGERS)
    packed = name in ("pack-quantized", IQ4_PACKED)
    if (kind == "float" and (bits, packed) != (8, False)) or (bits < 8 and not packed):
        raise unsupported("weights.num_bits", bits, f"other widths than {kind}{bits} in {name}")
    if name == IQ4_PACKED:
        return _iq4_weights(bits, declared)
    symmetric = expect(declared, "symmetric", True, False, default=True)
    if not symmetric and not (packed and bits == 4):
        raise unsupported("weights.symmetric", False, "zero points in 4-bit packed weights only")
    scattered = expect(declared, "actorder", *_IN_ORDER, *_SCATTERED) in _SCATTERED
    strategy = expect(declared, "strategy", *_STRATEGIES, default=_default_strategy(declared))
    if name == _MXFP8 and (kind, strategy) != ("float", "group"):
        raise unsupported("weights.strategy", strategy, f"FP8 weights in groups in {name}")
    group_size = None
    if strategy == "group":
        group_size = positive_size("weights.group_size", declared.get("group_size"))
    if bits == 6 and (group_size is None or group_size % _SIX_BIT_GROUPS):
        known = f"6-bit weights in groups of a multiple of {_SIX_BIT_GROUPS} only"
        raise unsupported("weights.num_bits", bits, known)
    if strategy == "block" and kind != "float":
        raise unsupported("weights.strategy", strategy, "blocks in FP8 weights only")
    if scattered and not (packed and strategy == "group"):
        known = "'group' in packed weights in groups only"
        raise unsupported("weights.actorder", declared["actorder"], known)
    return _Weights(
        packed,
        "f8e4m3" if kind == "float" else _INTEGERS[bits],
        bits,
        symmetric,
        strategy,
        group_size,
        block_size("weights.block_structure", declared.get("block_structure"))
        if strategy == "block"
        else None,
        name == _MXFP8,
        scattered,
    )


def _iq4_weights(bits: int, declared: Mapping[str, Any]) -> _Weights:
    size = expect(declared, "group_size", *GROUPS)
    if bits != 4:
        raise unsupported("weights.num_bits", bits, "4 bits of iq4")
    return _Weights(True, "iq4", bits, True, "group", size, None)


def _fp4_weights(name: str, declared: Mapping[str, Any]) -> _Weights:
    weight, strategy, group_size = _FP4[name]
    known = {"type": "float", "num_bits": 4, "strategy": strategy, "group_size": group_size}
    for field, value in known.items():
        expect({f"weights.{field}": declared.get(field, value)}, f"weights.{field}", value)
    expect(declared, "symmetric", True, default=True)
    return _Weights(True, weight, 4, True, "group", group_size, None)


def _default_strategy(declared: Mapping[str, Any]) -> str:
    size = declared.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _activations(declared: Mapping[str, Any], weights: _Weights) -> _Activations:
    if not declared:
        return "none"
    if weights.weight == "f4e2m1":
        return _fp4_activations(declared)
    kind = (declared.get("type", "int"), declared.get("num_bits"))
    wanted = {"f8e4m3": ("float", 8), "i8": ("int", 8)}.get(weights.weight)
    if declared.get("dynamic"):
        return "dynamic" if kind == wanted and _by_row(declared, weights) else "exact"
    if kind != wanted or declared.get("strategy", "tensor") != "tensor":
        raise unsupported(
            "input_activations",
            f"static {kind[0]}{kind[1]} by {declared.get('strategy')}",
            "static activations of the weights' own type, one scale a tensor",
        )
    expect(declared, "symmetric", True, default=True)
    return "static"


def _fp4_activations(declared: Mapping[str, Any]) -> _Activations:
    """Groups of them get their scales as they come, in units of a static one."""
    known = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": nvfp4.GROUP}
    for field, value in known.items():
        name = f"input_activations.{field}"
        expect({name: declared.get(field, value)}, name, value)
    expect(declared, "dynamic", "local", False, default=False)
    return "static"


def _by_row(declared: Mapping[str, Any], weights: _Weights) -> bool:
    """Whether rows of activations, or their groups that are the weights', have scales."""
    if not declared.get("symmetric", True) or weights.group_size is not None:
        return False
    if weights.block is None:
        return declared.get("strategy") == "token"
    return (declared.get("strategy"), declared.get("group_size")) == ("group", weights.block[1])


def _rotated(prefix: str, linear: QuantizedLinear, block: int) -> QuantizedLinear:
    """A linear whose weight was rotated, in blocks of so many input channels."""
    if not block:
        return linear
    if (linear.weight, linear.dynamic, linear.group_size) != ("i8", True, None):
        known = "rotations of int8 weights whose activations are int8 by token"
        raise unsupported(TRANSFORMS, prefix, known)
    scale = linear.tensors["weight_scale"]
    # Weights and activations are each multiplied by the matrix over the root of its size.
    over = partial(_over_root, function=scale.function or as_f32, size=block)
    tensors = {**linear.tensors, "weight_scale": TensorSource(scale.names, over)}
    return replace(linear, tensors=tensors, hadamard=block)


def _over_root(*tensors: Array, function: Callable[..., Array], size: int) -> Array:
    return function(*tensors) * np.float32(size**-0.5)


def _scheme(group: _Group, prefix: str, block: int = 0) -> Scheme:
    """Of a linear of a group.

    Args:
        block: of its rotation.
    """
    weights = group.weights
    how = "exact" if group.activations == "none" else group.activations
    name = {
        ("f8e4m3", "static"): "fp8",
        ("f8e4m3", "dynamic"): "fp8_dynamic" if weights.block is None else "fp8_blocks",
        ("f8e4m3", "exact"): "fp8_weights",
        ("i8", "static"): "int8_sq",
        ("i8", "dynamic"): "int8_dynamic",
        ("i8", "exact"): "int8_weights",
        ("i4", "exact"): "int4_gptq",
        ("i6", "exact"): "int6_g128",
        ("iq4", "exact"): "iq4",
        ("mxfp4", "exact"): "mxfp4" if is_expert(prefix) else "mxfp4_weights",
        ("f4e2m1", "static"): "nvfp4",
        ("f4e2m1", "exact"): "nvfp4_weights",
    }[weights.weight, how]
    group_size = weights.block[1] if weights.block else weights.group_size
    name = _ROTATED if block else name
    return replace(SCHEMES[name], group_size=group_size, pre_quant_scale=False, hadamard=block)


def _kv_dtype(declared: Mapping[str, Any]) -> Literal["f8e4m3"] | None:
    if not declared:
        return None
    kind = (declared.get("type"), declared.get("num_bits"), declared.get("strategy", "tensor"))
    if kind != ("float", 8, "tensor") or declared.get("dynamic"):
        raise unsupported("kv_cache_scheme", dict(declared), "static FP8, one scale a tensor")
    return "f8e4m3"


def _linear(
    stored: StoredTensors, prefix: str, weights: _Weights, activations: _Activations
) -> QuantizedLinear:
    if weights.weight == "mxfp4":
        return mxfp4.of_linear(stored, prefix)
    if weights.weight == "f4e2m1":
        return nvfp4.of_compressed(stored, prefix, rounds_inputs=activations == "static")
    source, rows, columns = _weight(stored, prefix, weights)
    tensors = {"weight": source}
    scale = f"{prefix}.weight_scale"
    group_size = weights.group_size
    if weights.weight == "iq4":
        stored.require(scale, ("U8",), (rows, num_groups(scale, columns, weights.group_size or 1)))
        stored.require(f"{scale}_2", ("F32",), ())
        tensors["weight_scale"] = TensorSource((scale, f"{scale}_2"), scales_of)
    elif weights.has_exponents:
        assert group_size is not None
        tensors["weight_scale"] = stored.exponent_scale(scale, rows, columns, group_size)
    elif weights.block is None:
        tensors["weight_scale"] = stored.group_scale(scale, rows, columns, group_size)
    else:
        tensors["weight_scale"], group_size = block_scale(
            stored, scale, rows, columns, weights.block
        )
    if not weights.symmetric:
        zero = f"{prefix}.weight_zero_point"
        groups = 1 if group_size is None else num_groups(scale, columns, group_size)
        stored.require(zero, ("I32",), (-(-rows * weights.bits // 32), groups))
        tensors["weight_zero"] = TensorSource((zero,), partial(_zeros, rows=rows))
    if weights.scattered:
        tensors |= _scattered(stored, prefix, columns, weights)
    if activations == "static":
        tensors["input_scale"] = stored.scalar(f"{prefix}.input_scale")
    return QuantizedLinear(
        weights.weight,
        tensors,
        group_size,
        not weights.symmetric,
        (rows, columns),
        activations == "dynamic",
    )


def _weight(stored: StoredTensors, prefix: str, weights: _Weights) -> tuple[TensorSource, int, int]:
    if not weights.packed:
        name = f"{prefix}.weight"
        rows, columns = stored.matrix(name, "F8_E4M3" if weights.weight == "f8e4m3" else "I8")
        return TensorSource((name,)), rows, columns
    name = f"{prefix}.weight_packed"
    rows, words = stored.matrix(name, "I32")
    is_signed = weights.symmetric and weights.weight != "iq4"
    read = partial(_unpacked, bits=weights.bits, symmetric=is_signed)
    return TensorSource((name,), read), rows, words * 32 // weights.bits


def _scattered(
    stored: StoredTensors, prefix: str, columns: int, weights: _Weights
) -> dict[str, TensorSource]:
    """The weight with its columns sorted by groups, and their order."""
    name, size = f"{prefix}.weight_g_idx", weights.group_size
    assert size is not None
    stored.require(name, ("I32",), (columns,))
    order = partial(order_of_groups, name=name, group_size=size)

    def sorted_weight(words: Array, g_idx: Array) -> Array:
        codes = _unpacked(words, bits=weights.bits, symmetric=weights.symmetric)
        return np.ascontiguousarray(codes[:, order(g_idx)])

    return {
        "weight": TensorSource((f"{prefix}.weight_packed", name), sorted_weight),
        "column_order": TensorSource((name,), order),
    }


def _unpacked(words: Array, *, bits: int, symmetric: bool) -> Array:
    codes = unpack_words(words, bits, axis=1)
    if bits == 8:
        return offset_bytes(codes)
    if bits == 6:
        return offset_sixes(codes)
    return offset_nibbles(codes) if symmetric else codes.astype(ml_dtypes.uint4)


def _zeros(words: Array, *, rows: int) -> Array:
    """[N, G] u4 of zero points packed along N."""
    return np.ascontiguousarray(unpack_words(words, 4, axis=0)[:rows]).astype(ml_dtypes.uint4)
