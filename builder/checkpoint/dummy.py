"""Weights without a checkpoint, for --dummy-weights: the right names, shapes and types.

An engine built from them holds no weights; only scales that passes compare are ever read here.
"""

import zlib
from collections.abc import Callable, Mapping

import numpy as np

from trtc.builder.checkpoint.verify import Shape, expected_tensors
from trtc.builder.recipes import Array
from trtc.builder.spec import DecoderSpec, LinearSpec
from trtc.plugins.rounding import NUMPY_DTYPES, cast
from trtc.plugins.six_bits import LEAST, MOST
from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.formats.mxfp4 import BLOCKS, GROUP, SCALES, of_experts
from trtc.quant.formats.stored import num_groups
from trtc.quant.scheme import CheckpointQuantization, QuantizedLinear, Scheme, TensorSource

DUMMY = "dummy"
"""The source of a quantisation that no checkpoint has."""
_STD = 0.02
_QUANTIZED_STD: Mapping[str, float] = {
    "f8e4m3": 64.0,
    "i8": 40.0,
    "i6": 10.0,
    "i4": 2.5,
    "u4": 4.0,
    "f4e2m1": 2.0,
}
"""Spreads codes over much of their range."""
_RANGES: Mapping[str, tuple[int, int]] = {"i6": (LEAST, MOST), "i4": (-8, 7), "u4": (0, 15)}
"""Of codes of fewer than 8 bits."""
_EXPONENT = 127 - 7
"""As E8M0: 2^-7, which makes E2M1 codes about as large as _STD."""


class DummyReader:
    """Reproducible random tensors by name: the same name, type and shape give the same values."""

    def __init__(self, tensors: Mapping[str, tuple[str, Shape]]) -> None:
        """`tensors`: (element type of protos/dtypes.py, or i6, shape) by name."""
        self._tensors = tensors

    @property
    def tensors(self) -> Mapping[str, tuple[str, Shape]]:
        return self._tensors

    def read(self, name: str) -> Array:
        """Normal values; scales are all alike, norm weights near one.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is not part of this model", field="config.json")
        dtype, shape = self._tensors[name]
        if dtype == "u8":
            return _mxfp4(name, shape)
        if dtype == "f8e4m3" and name.endswith("weight_scale"):
            return np.ones(shape, np.float32)
        if name.endswith(("scale", "scale_2")):
            return np.full(shape, 1.0 if name.endswith("pre_quant_scale") else 2.0**-10, np.float32)
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if len(shape) == 1:
            return cast(1.0 + _STD * noise, dtype)
        values = _QUANTIZED_STD.get(dtype, _STD) * noise
        if dtype in _RANGES:
            least, most = _RANGES[dtype]
            codes: Array = np.clip(np.rint(values) + (least + most + 1) // 2, least, most)
            return codes.astype(NUMPY_DTYPES["i8" if dtype == "i6" else dtype])
        return cast(values, dtype)


def dummy_checkpoint(
    spec: DecoderSpec, scheme: Scheme, scheme_of: Callable[[str], Scheme] | None = None
) -> tuple[DummyReader, CheckpointQuantization | None]:
    """A reader for every tensor of `spec`, and how its linears are quantised under `scheme`.

    Args:
        scheme_of: of each linear by name, where they differ.
    """
    tensors: dict[str, tuple[str, Shape]] = {
        name: ("bf16", shape) for name, shape in expected_tensors(spec).items()
    }
    if scheme.weight in ("f32", "bf16") and scheme_of is None:
        return DummyReader(tensors), None
    if scheme.name == "mxfp4":
        return _dummy_experts(spec, scheme, tensors)
    keeps_pre_scale = _keep_pre_scale(spec, scheme)
    linears: dict[str, QuantizedLinear] = {}
    for linear in spec.linears:
        if linear.of_experts is not None:
            raise UnsupportedError(
                "is a tensor of all experts, which trtc cannot quantise",
                field=linear.name,
                remedy="Build with --dtype bf16, or give a checkpoint that is quantised",
            )
        own = scheme if scheme_of is None else scheme_of(linear.name)
        if own.weight == "bf16":
            continue
        rows = tensors[f"{linear.name}.weight"][1][0]
        canonical = _canonical(linear, rows, own, linear.name in keeps_pre_scale)
        tensors |= {f"{linear.name}.{key}": value for key, value in canonical.items()}
        linears[linear.name] = QuantizedLinear(
            own.weight,
            {key: TensorSource((f"{linear.name}.{key}",)) for key in canonical},
            own.group_size,
            dynamic=own.dynamic,
            hadamard=own.hadamard,
        )
    return DummyReader(tensors), CheckpointQuantization(DUMMY, scheme, linears, kv_scales={})


def _dummy_experts(
    spec: DecoderSpec, scheme: Scheme, tensors: dict[str, tuple[str, Shape]]
) -> tuple[DummyReader, CheckpointQuantization]:
    """Only tensors of all experts are quantised.

    Raises:
        UnsupportedError: there are none.
    """
    linears: dict[str, QuantizedLinear] = {}
    for linear in spec.linears:
        place = linear.of_experts
        if place is None or linear.name in linears:
            continue
        shape = (place.num_experts, place.rows, linear.in_features)
        groups = num_groups(linear.name, linear.in_features, GROUP)
        linears[linear.name] = of_experts(linear.name, shape)
        del tensors[linear.weight_name]
        tensors[f"{linear.name}{BLOCKS}"] = ("u8", (*shape[:2], groups, GROUP // 2))
        tensors[f"{linear.name}{SCALES}"] = ("u8", (*shape[:2], groups))
    if not linears:
        raise UnsupportedError(
            f"{scheme.name} is for models whose experts lie in one tensor", field="--dtype"
        )
    return DummyReader(tensors), CheckpointQuantization(DUMMY, scheme, linears, kv_scales={})


def _mxfp4(name: str, shape: Shape) -> Array:
    """Random codes, and scales that are alike."""
    if name.endswith((SCALES, ".weight_scale")):
        return np.full(shape, _EXPONENT, np.uint8)
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, shape, np.uint8)


def _keep_pre_scale(spec: DecoderSpec, scheme: Scheme) -> set[str]:
    """AWQ folds the scales of linears that share an input into the norm before them."""
    if not scheme.pre_quant_scale:
        return set()
    if scheme.activation == "i8":
        return {linear.name for linear in spec.linears}
    kept: set[str] = set()
    for layer in spec.layers:
        kept |= {one.name for one in layer.mixer_linears[-1:]}
        kept |= {mlp.down.name for mlp in layer.mlps}
    return kept


def _canonical(
    linear: LinearSpec, rows: int, scheme: Scheme, has_pre_scale: bool
) -> dict[str, tuple[str, Shape]]:
    """The tensors of quant/scheme.py's QuantizedLinear."""
    columns = linear.in_features
    weight = {"i4_f8": "i4", "iq4": "u4", "mxfp4": "f4e2m1"}.get(scheme.weight, scheme.weight)
    per_tensor = scheme.weight == "f8e4m3" and not scheme.dynamic
    groups = columns // scheme.group_size if scheme.group_size else 1
    tensors: dict[str, tuple[str, Shape]] = {
        "weight": (weight, (rows, columns)),
        "weight_scale": ("f32", (1, 1) if per_tensor else (rows, groups)),
    }
    if scheme.weight == "f4e2m1":
        tensors["weight_scale"] = ("f8e4m3", (rows, groups))
    if scheme.weight == "mxfp4":
        tensors["weight_scale"] = ("u8", (rows, groups))
    if scheme.weight in ("i4_f8", "f4e2m1"):
        tensors["weight_scale_2"] = ("f32", ())
    if scheme.activation in ("f8e4m3", "f4e2m1", "i8") and not scheme.dynamic:
        tensors["input_scale"] = ("f32", ())
    if has_pre_scale:
        tensors["pre_quant_scale"] = ("f32", (columns,))
    return tensors
