"""NVFP4 weights: E2M1 in groups of 16, each with an E4M3 scale in units of the tensor's f32 scale.

    nvidia-modelopt      weight         U8 [N, K/2]   weight_scale F8_E4M3 [N, K/16]
                         weight_scale_2 F32 ()        input_scale F32 ()
    compressed-tensors   weight_packed  U8 [N, K/2]   weight_scale F8_E4M3 [N, K/16]
                         weight_global_scale F32 [1]  input_global_scale F32 [1]

Two E2M1 numbers are in a byte, the first in the low half. Global scales are the reciprocals of the
others.
"""

from functools import partial

import numpy as np

from trtc.protos.errors import CheckpointError
from trtc.quant.formats.stored import Array, StoredTensors, num_groups
from trtc.quant.pack import unpack_e2m1_pairs
from trtc.quant.scheme import QuantizedLinear, TensorSource

GROUP = 16
"""Weights that share a scale."""


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
    return QuantizedLinear("f4e2m1", tensors, GROUP, shape=shape)


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
