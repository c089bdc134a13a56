"""Quantised checkpoints by the documented layout of each format, and canonical tensors read back.

The writers share no code with trtc.quant: each place of a word is filled by itself, as the format's
own documentation says, and every writer also gives the weights that its tensors stand for.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtc.plugins.iq4 import values_of
from trtc.quant.fused_experts import FUSED_EXPERTS
from trtc.quant.scheme import CheckpointQuantization, QuantizedLinear

Array = NDArray[Any]
Tensors = dict[str, Array]

_SAFETENSORS = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def headers(tensors: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a reader may know of tensors before it reads them."""
    return {name: (_SAFETENSORS[str(a.dtype)], a.shape) for name, a in tensors.items()}


def canonical(linear: QuantizedLinear, tensors: Mapping[str, Array]) -> Tensors:
    """The canonical tensors of a linear, computed."""
    return {
        name: (
            tensors[source.names[0]]
            if source.function is None
            else source.function(*(tensors[n] for n in source.names))
        )
        for name, source in linear.tensors.items()
    }


def dequantized(
    quantization: CheckpointQuantization, prefix: str, tensors: Mapping[str, Array]
) -> NDArray[np.float64]:
    """weight_scale * (weight - weight_zero) of a linear, in float64, as the contract says it; E4M3
    scales are in units of weight_scale_2, and E8M0 ones exponents. What is to multiply a rotated
    input is rotated back."""
    linear = quantization.linears[prefix]
    found = canonical(linear, tensors)
    codes = found["weight"]
    weight = (values_of(codes) if linear.weight == "iq4" else codes).astype(np.float64)
    scale = found["weight_scale"].astype(np.float64)
    zero = found["weight_zero"].astype(np.float64) if linear.has_zero_point else np.zeros((1, 1))
    scale_types = {"f4e2m1": ml_dtypes.float8_e4m3fn, "mxfp4": np.uint8}
    assert scale.ndim == 2
    assert found["weight_scale"].dtype == scale_types.get(linear.weight, np.float32)
    if linear.weight == "f4e2m1":
        scale = scale * float(found["weight_scale_2"])
    if linear.weight == "mxfp4":
        scale = 2.0 ** (scale - 127)
    size = linear.group_size or weight.shape[1]
    if scale.shape[1] > 1:
        assert scale.shape == (weight.shape[0], weight.shape[1] // size)
        scale = scale.repeat(size, axis=1)
    if zero.shape[1] > 1:
        zero = zero.repeat(size, axis=1)
    exact = scale * (weight - zero)
    if linear.hadamard:
        matrix = np.ones((1, 1))
        while len(matrix) < linear.hadamard:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        exact = (exact.reshape(len(exact), -1, len(matrix)) @ matrix).reshape(exact.shape)
    if not linear.is_scattered:
        return exact
    assert found["column_order"].dtype == np.int32
    inputs = np.empty_like(exact)
    inputs[:, found["column_order"]] = exact
    return inputs


def awq_linear(
    prefix: str, rows: int, columns: int, group: int, seed: int = 0
) -> tuple[Tensors, NDArray[np.float64]]:
    """An AutoAWQ linear and the weight [N, K] that it stands for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (columns, rows))
    zeros = rng.integers(0, 16, (columns // group, rows))
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    tensors = {
        f"{prefix}.qweight": _awq_words(codes),
        f"{prefix}.qzeros": _awq_words(zeros),
        f"{prefix}.scales": scales,
    }
    weight = scales.repeat(group, 0).astype(np.float64) * (codes - zeros.repeat(group, 0))
    return tensors, weight.T


def _awq_words(codes: Array) -> Array:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(AWQ_COLUMN_OF_NIBBLE):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def gptq_linear(
    prefix: str,
    rows: int,
    columns: int,
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    v2: bool = False,
    g_idx: Array | None = None,
    seed: int = 0,
) -> tuple[Tensors, NDArray[np.float64]]:
    """A GPTQ linear and the weight [N, K] that it stands for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (columns, rows))
    zeros = rng.integers(0, 1 << bits, (columns // group, rows))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    else:
        zeros[0, 0] = 0  # v1 stores it as -1
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    tensors = {
        f"{prefix}.qweight": _words_down(codes, bits),
        f"{prefix}.qzeros": _words_down((zeros if v2 else zeros - 1).T, bits).T.copy(),
        f"{prefix}.scales": scales,
        f"{prefix}.g_idx": (np.arange(columns) // group if g_idx is None else g_idx).astype(
            np.int32
        ),
    }
    group_of = tensors[f"{prefix}.g_idx"]
    weight = scales.astype(np.float64)[group_of] * (codes - zeros[group_of])
    return tensors, weight.T


def _words_down(codes: Array, bits: int) -> Array:
    """Words packed along the first axis, lowest bits first."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0] // per_word, codes.shape[1]), np.uint32)
    for place in range(per_word):
        own = (codes[place::per_word] % (1 << bits)).astype(np.uint32)
        words |= own << np.uint32(bits * place)
    return words.view(np.int32)


def packed_linear(
    prefix: str,
    rows: int,
    columns: int,
    group: int | None,
    *,
    bits: int = 4,
    symmetric: bool = True,
    g_idx: Array | None = None,
    seed: int = 0,
) -> tuple[Tensors, NDArray[np.float64]]:
    """A compressed-tensors pack-quantized linear and the weight [N, K] that it stands for."""
    rng = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    values = rng.integers(-half, half, (rows, columns))
    size = group or columns
    scale = rng.uniform(0.01, 0.1, (rows, columns // size)).astype(ml_dtypes.bfloat16)
    zeros = rng.integers(-half, half, scale.shape) if not symmetric else np.zeros(scale.shape, int)
    tensors = {
        f"{prefix}.weight_packed": _words_down((values + half).T, bits).T.copy(),
        f"{prefix}.weight_scale": scale,
        f"{prefix}.weight_shape": np.array([rows, columns], np.int64),
    }
    if not symmetric:
        tensors[f"{prefix}.weight_zero_point"] = _words_down(zeros + half, bits)
    group_of = np.arange(columns) // size
    if g_idx is not None:
        group_of = g_idx
        tensors[f"{prefix}.weight_g_idx"] = g_idx.astype(np.int32)
    weight = scale.astype(np.float64)[:, group_of] * (values - zeros[:, group_of])
    return tensors, weight


def mxfp4_linear(
    prefix: str, rows: int, columns: int, seed: int = 0
) -> tuple[Tensors, NDArray[np.float64]]:
    """A compressed-tensors mxfp4-pack-quantized linear and the weight that it stands for."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, columns))
    exponents = rng.integers(118, 124, (rows, columns // 32))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    tensors = {
        f"{prefix}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        f"{prefix}.weight_scale": exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
    }
    return tensors, values * 2.0 ** (exponents - 127).repeat(32, axis=1)


def nvfp4_linear(
    prefix: str, rows: int, columns: int, seed: int = 0, *, modelopt: bool = False
) -> tuple[Tensors, NDArray[np.float64]]:
    """An NVFP4 linear of compressed-tensors or nvidia-modelopt, and the weight that it stands for,
    of which rows have a size of 1.5."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, columns))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    scale = rng.uniform(20, 448, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    weight = values * scale.astype(np.float64).repeat(16, axis=1)
    reciprocal = np.float32(np.std(weight) * np.sqrt(columns) / 1.5)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    tensors: Tensors = {f"{prefix}.weight_scale": scale}
    if modelopt:
        tensors[f"{prefix}.weight"] = packed
        tensors[f"{prefix}.weight_scale_2"] = np.asarray(np.float32(1) / reciprocal)
        tensors[f"{prefix}.input_scale"] = np.asarray(np.float32(0.01))
    else:
        tensors[f"{prefix}.weight_packed"] = packed
        tensors[f"{prefix}.weight_global_scale"] = np.asarray([reciprocal])
        tensors[f"{prefix}.input_global_scale"] = np.asarray([100.0], np.float32)
    return tensors, weight / float(reciprocal)


def fp8_linear(
    prefix: str, rows: int, columns: int, *, static: bool, seed: int = 0
) -> tuple[Tensors, NDArray[np.float64]]:
    """A per-tensor FP8 linear and the weight that it stands for."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(0.037)
    tensors = {f"{prefix}.weight": weight, f"{prefix}.weight_scale": np.array(scale)}
    if static:
        tensors[f"{prefix}.input_scale"] = np.array(0.25, np.float32)
    return tensors, weight.astype(np.float64) * float(scale)


def fp8_block_linear(
    prefix: str,
    rows: int,
    columns: int,
    block: tuple[int, int] = (128, 128),
    seed: int = 0,
    *,
    powers_of_two: bool = False,
) -> tuple[Tensors, NDArray[np.float64]]:
    """A fine-grained FP8 linear (a scale a block) and the weight that it stands for.

    Args:
        powers_of_two: scales are E8M0.
    """
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 1, (-(-rows // block[0]), -(-columns // block[1])))
    scale = scale.astype(ml_dtypes.float8_e8m0fnu if powers_of_two else np.float32)
    exact = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            exact[row, column] = float(weight[row, column]) * float(
                scale[row // block[0], column // block[1]]
            )
    return {f"{prefix}.weight": weight, f"{prefix}.weight_scale_inv": scale}, exact


def taken_apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Experts that lie in two tensors a layer, as tensors of their own."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        for gate_up, down in FUSED_EXPERTS:
            if tensor.ndim == 3 and name.endswith(gate_up):
                module = name.removesuffix(gate_up)
                experts = zip(found.pop(name), found.pop(module + down), strict=True)
                for number, (both, last) in enumerate(experts):
                    if ".feed_forward." in module:  # Llama 4's are transposed
                        both, last = both.T, last.T
                    gate, up = np.split(both, 2)
                    parts = {"gate_proj": gate, "up_proj": up, "down_proj": last}
                    for part, weight in parts.items():
                        found[f"{module}experts.{number}.{part}.weight"] = weight
    return found
