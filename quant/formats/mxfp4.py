"""MXFP4 weights, in the OCP Microscaling Formats 1.0: routed experts as gpt-oss is released, and
linears in compressed-tensors' layout.

Of a tensor `p` of all experts [E, N, K]

    p_blocks         u8 [E, N, K/32, 16]  E2M1, two a byte, the first in the low half
    p_scales         u8 [E, N, K/32]      E8M0: value = 2^(scale - 127) * weight

with all else in bf16, biases called `p_bias`; of a linear [N, K]

    p.weight_packed  u8 [N, K/2]          E2M1, likewise
    p.weight_scale   u8 [N, K/32]         E8M0
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trtc.protos.errors import CheckpointError
from trtc.quant.formats.listed import ListedModules
from trtc.quant.formats.stored import Array, StoredTensors, num_groups
from trtc.quant.pack import unpack_e2m1_pairs
from trtc.quant.scheme import SCHEMES, CheckpointQuantization, QuantizedLinear, TensorSource

GROUP = 32
"""Weights that share a scale."""
BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = GROUP // 2
_NAN = 255


def read_mxfp4(
    config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> CheckpointQuantization:
    """Read a `quantization_config` whose `quant_method` is mxfp4.

    Raises:
        CheckpointError: tensors that are missing or contradict the config or each other.
    """
    stored = StoredTensors(tensors)
    excluded = ListedModules(config, "modules_to_not_convert")
    linears = {}
    for name in sorted(tensors):
        if name.endswith(BLOCKS):
            prefix = name.removesuffix(BLOCKS)
            excluded.check(prefix)
            linears[prefix] = _experts(stored, prefix)
    return CheckpointQuantization(
        "mxfp4", replace(SCHEMES["mxfp4"], group_size=GROUP), linears, kv_scales={}
    )


def of_experts(prefix: str, shape: tuple[int, int, int]) -> QuantizedLinear:
    """The tensors of all experts [E, N, K] whose names begin with `prefix`."""
    scales = f"{prefix}{SCALES}"
    tensors = {
        "weight": TensorSource((f"{prefix}{BLOCKS}",), _weight),
        "weight_scale": TensorSource((scales,), partial(_scale, name=scales)),
    }
    return QuantizedLinear("mxfp4", tensors, GROUP, shape=shape)


def of_linear(stored: StoredTensors, prefix: str) -> QuantizedLinear:
    """A linear in compressed-tensors' layout.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedError: groups of 32 do not divide its input features.
    """
    packed, scales = f"{prefix}.weight_packed", f"{prefix}.weight_scale"
    rows, pairs = stored.matrix(packed, "U8")
    columns = 2 * pairs
    stored.require(scales, ("U8", "F8_E8M0"), (rows, num_groups(scales, columns, GROUP)))
    tensors = {
        "weight": TensorSource((packed,), unpack_e2m1_pairs),
        "weight_scale": TensorSource((scales,), partial(_scale, name=scales)),
    }
    return QuantizedLinear("mxfp4", tensors, GROUP, shape=(rows, columns))


def _experts(stored: StoredTensors, prefix: str) -> QuantizedLinear:
    name = f"{prefix}{BLOCKS}"
    shape = stored.require(name, ("U8",))
    if len(shape) != 4 or 0 in shape or shape[3] != _BYTES:
        raise CheckpointError(
            f"has shape {list(shape)}, not [experts, rows, groups, {_BYTES}]", field=name
        )
    experts, rows, groups, _ = shape
    stored.require(f"{prefix}{SCALES}", ("U8",), (experts, rows, groups))
    return of_experts(prefix, (experts, rows, groups * GROUP))


def _weight(blocks: Array) -> Array:
    """[N, K] of [N, G, 16]."""
    return unpack_e2m1_pairs(blocks.reshape(len(blocks), -1))


def _scale(scales: Array, *, name: str) -> Array:
    exponents = scales.view(np.uint8)
    if bool(np.any(exponents == _NAN)):
        raise CheckpointError(
            "a scale is NaN", field=name, remedy="Download or export the checkpoint again"
        )
    return exponents
