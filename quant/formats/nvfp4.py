"""NVFP4 weights: E2M1 in groups of 16, each with an E4M3 scale in units of the tensor's f32 scale.

    nvidia-modelopt      weight         U8 [N, K/2]   weight_scale F8_E4M3 [N, K/16]
                         weight_scale_2 F32 ()        input_scale F32 ()
    compressed-tensors   weight_packed  U8 [N, K/2]   weight_scale F8_E4M3 [N, K/16]
                         weight_global_scale F32 [1]  input_global_scale F32 [1]

Two E2M1 numbers are in a byte, the first in the low half. Global scales are the reciprocals of the
others. A target without FP4 arithmetic multiplies the weights alone. Twice a number of E2M1 is an
integer of at most 12, so they become int8 with half the scale, which is exact.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from trtc.protos.errors import CheckpointError
from trtc.quant.formats.stored import Array, StoredTensors, num_groups
from trtc.quant.pack import doubled_e2m1, unpack_e2m1_pairs
from trtc.quant.scheme import (
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    TensorSource,
    WeightFormat,
)

GROUP = 16
"""Weights that share a scale."""
AS_INT8 = (
    "NVFP4 weights are stored as int8 in groups of 16, which is exact: the target has no FP4 "
    "arithmetic. Activations are multiplied as they are"
)
"""A note of what a target does with linears."""
WEIGHTS_ONLY = (
    "NVFP4 weights whose activations are not NVFP4 are stored as int8 in groups of 16, which is "
    "exact"
)
"""A note of what all targets do with linears."""
_FORMAT: WeightFormat = "f4e2m1"


def weights_of(
    stored: StoredTensors, prefix: str, packed: str, group_size: int = GROUP
) -> tuple[dict[str, TensorSource], tuple[int, int]]:
    """Codes and scales of groups of a linear, and (N, K).

    Args:
        packed: the name of the tensor of codes after the prefix.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedError: the groups do not divide its input features.
    """
    name, scale = f"{prefix}.{packed}", f"{prefix}.weight_scale"
    rows, pairs = stored.matrix(name, "U8")
    columns = 2 * pairs
    stored.require(scale, ("F8_E4M3",), (rows, num_groups(scale, columns, group_size)))
    tensors = {
        "weight": TensorSource((name,), unpack_e2m1_pairs),
        "weight_scale": TensorSource((scale,)),
    }
    return tensors, (rows, columns)


def of_compressed(stored: StoredTensors, prefix: str, *, rounds_inputs: bool) -> QuantizedLinear:
    """A linear in compressed-tensors' layout.

    Args:
        rounds_inputs: whether its activations are NVFP4 too.

    Raises: as `weights_of`.
    """
    tensors, shape = weights_of(stored, prefix, "weight_packed")
    scales = {"weight_scale_2": f"{prefix}.weight_global_scale"}
    if rounds_inputs:
        scales["input_scale"] = f"{prefix}.input_global_scale"
    for name, stored_name in scales.items():
        stored.require(stored_name, ("F32",), (1,), ())
        tensors[name] = TensorSource((stored_name,), partial(_reciprocal, name=stored_name))
    found = QuantizedLinear(_FORMAT, tensors, GROUP, shape=shape)
    return found if rounds_inputs else _as_int8(found)


def without_fp4(found: CheckpointQuantization) -> CheckpointQuantization:
    """For targets that have no FP4 arithmetic: the same weights in int8, by activations as they
    are, and a note that says so."""
    if found.scheme.weight != _FORMAT:
        return found
    linears = {name: _as_int8(linear) for name, linear in found.linears.items()}
    scheme = replace(SCHEMES["int8_weights"], group_size=found.scheme.group_size)
    return replace(found, scheme=scheme, linears=linears, notes=(*found.notes, AS_INT8))


def _as_int8(linear: QuantizedLinear) -> QuantizedLinear:
    kept = {
        name: source
        for name, source in linear.tensors.items()
        if name not in ("weight_scale_2", "input_scale")
    }
    scales = (linear.tensors["weight_scale"], linear.tensors["weight_scale_2"])
    changed = {
        "weight": _applied(doubled_e2m1, linear.tensors["weight"]),
        "weight_scale": _applied(_halved, *scales),
    }
    return replace(linear, weight="i8", tensors={**kept, **changed})


def _applied(function: Callable[..., Array], *sources: TensorSource) -> TensorSource:
    """A function of what the sources give."""

    def read(*arrays: Array) -> Array:
        rest = iter(arrays)
        given: list[Any] = []
        for source in sources:
            own = list(islice(rest, len(source.names)))
            given.append(source.function(*own) if source.function else own[0])
        return function(*given)

    return TensorSource(tuple(name for source in sources for name in source.names), read)


def _halved(scale: Array, unit: Array) -> Array:
    """[N, G] f32."""
    return scale.astype(np.float32) * (unit.astype(np.float32) * np.float32(0.5))


def _reciprocal(scale: Array, *, name: str) -> Array:
    """() f32."""
    value = np.float32(scale.reshape(-1)[0])
    if not np.isfinite(value) or value <= 0:
        raise CheckpointError(
            f"is {value}, not a positive number",
            field=name,
            remedy="Download or export the checkpoint again",
        )
    return np.asarray(np.float32(1) / value, np.float32)
