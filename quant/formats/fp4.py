"""E2M1 weights as targets multiply them, where checkpoints have them in another way.

Twice a number of E2M1 is an integer of at most 12, so weights may become int8 with half the scales,
which is exact.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from trtc.quant.formats.stored import Array, powers_of_two
from trtc.quant.pack import doubled_e2m1
from trtc.quant.scheme import (
    MIXED,
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    Scheme,
    TensorSource,
    mixed,
)

ACTIVATIONS = (
    "the target has no FP4 arithmetic: activations of NVFP4 weights are multiplied as they are"
)
WEIGHTS_ONLY = (
    "4-bit weights (MXFP4, NVFP4) whose activations are not of 4 bits are stored as int8, which is "
    "exact"
)
_EXPERT = re.compile(r"\.experts\.")


def is_expert(prefix: str) -> bool:
    """Whether a linear, or a tensor of several, is of routed experts."""
    return _EXPERT.search(prefix) is not None


def without_fp4(found: CheckpointQuantization) -> CheckpointQuantization:
    """For targets that have no FP4 arithmetic, but kernels for E2M1 weights: activations of NVFP4
    stay as they are."""
    linears, notes = {}, []
    for name, linear in found.linears.items():
        if linear.weight == "f4e2m1" and "input_scale" in linear.tensors:
            notes.append(ACTIVATIONS)
            linear = replace(linear, tensors=_without(linear, "input_scale"))
        linears[name] = linear
    return _changed(found, linears, notes)


def with_fp4_activations(found: CheckpointQuantization) -> CheckpointQuantization:
    """For targets that multiply E2M1 by E2M1: linears with other activations become int8. Experts
    with E8M0 scales, which no such target has kernels for, stay."""
    linears, notes = {}, []
    for name, linear in found.linears.items():
        is_nvfp4 = linear.weight == "f4e2m1" and "input_scale" not in linear.tensors
        if is_nvfp4 or (linear.weight == "mxfp4" and not is_expert(name)):
            notes.append(WEIGHTS_ONLY)
            linear = _as_int8(linear)
        linears[name] = linear
    return _changed(found, linears, notes)


def _changed(
    found: CheckpointQuantization, linears: dict[str, QuantizedLinear], notes: list[str]
) -> CheckpointQuantization:
    if not notes:
        return found
    schemes = dict.fromkeys(
        _scheme(found, linears[name], is_changed=linears[name] is not one)
        for name, one in found.linears.items()
    )
    notes = [*found.notes, *dict.fromkeys(notes)]
    return replace(found, scheme=mixed(list(schemes)), linears=linears, notes=tuple(notes))


def _scheme(found: CheckpointQuantization, linear: QuantizedLinear, *, is_changed: bool) -> Scheme:
    if is_changed:
        name = "int8_weights" if linear.weight == "i8" else "nvfp4_weights"
        return replace(SCHEMES[name], group_size=linear.group_size)
    if found.scheme.name != MIXED:
        return found.scheme
    return Scheme(MIXED, found.scheme.dtype, linear.weight, "bf16", linear.group_size)


def _without(linear: QuantizedLinear, *names: str) -> dict[str, TensorSource]:
    return {name: source for name, source in linear.tensors.items() if name not in names}


def _as_int8(linear: QuantizedLinear) -> QuantizedLinear:
    scales = (linear.tensors["weight_scale"],)
    if linear.weight == "mxfp4":
        halved = _applied(_halved_power, *scales)
    else:
        halved = _applied(_halved, *scales, linear.tensors["weight_scale_2"])
    changed = {
        "weight": _applied(doubled_e2m1, linear.tensors["weight"]),
        "weight_scale": halved,
    }
    kept = _without(linear, "weight_scale_2")
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


def _halved_power(exponents: Array) -> Array:
    """[N, G] f32."""
    return powers_of_two(exponents) * np.float32(0.5)
