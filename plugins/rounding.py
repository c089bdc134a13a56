"""Rounding and quantisation as ONNX defines them, for the references."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f4e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "i8": np.dtype(np.int8),
    "i4": np.dtype(ml_dtypes.int4),
    "u4": np.dtype(ml_dtypes.uint4),
    "i32": np.dtype(np.int32),
    "u8": np.dtype(np.uint8),
}
E4M3_MAX = 448.0
LARGEST_CODES = {"f8e4m3": E4M3_MAX, "i8": 127.0}
"""What the largest magnitude of a row, or a group of it, becomes."""
LEAST_MAGNITUDE = 1e-10
"""Rows of which all are smaller are scaled as if it was their largest: zeros stay zeros."""


def cast(x: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Round to nearest even into `dtype`, a trtc or numpy name, saturating as ONNX Cast does."""
    target = NUMPY_DTYPES.get(dtype) or np.dtype(dtype)
    values = x.astype(np.float32)
    if target == NUMPY_DTYPES["f8e4m3"]:
        values = np.clip(values, -E4M3_MAX, E4M3_MAX)
    if target == NUMPY_DTYPES["i8"]:
        values = np.clip(np.rint(values), -128, 127)
    with np.errstate(over="ignore"):  # a value past the largest is infinite, as IEEE rounds it
        return values.astype(target)


def quantize(
    x: NDArray[np.generic],
    pre_scale: NDArray[np.generic] | None,
    out_scale: NDArray[np.generic] | None,
    out_dtype: str,
    through: str,
) -> NDArray[np.generic]:
    """Round x to `through`, multiply by pre_scale (rounding again), divide by out_scale, cast.

    This is what the unfused graph does: a Mul (AWQ's and SmoothQuant's pre_quant_scale) and a
    QuantizeLinear over tensors of the activation type, so fusing them changes no bit.
    """
    values: NDArray[Any] = cast(x, through).astype(np.float32)
    if pre_scale is not None:
        values = cast(values * pre_scale.astype(np.float32), through).astype(np.float32)
    if out_scale is not None:
        with np.errstate(over="ignore"):  # an infinite quotient saturates
            values = values / out_scale.astype(np.float32)
    return cast(values, out_dtype)


def quantize_rows(
    x: NDArray[np.generic], scales: int, out_dtype: str
) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """Symmetric codes of x [M, K] by the largest magnitude of each row's K / scales channels.

    Returns:
        (codes [M, K] of `out_dtype`, f8e4m3 or i8; f32 scales [M, scales]): x = scale * code.
    """
    groups = x.astype(np.float32).reshape(len(x), scales, -1)
    largest = np.maximum(np.max(np.abs(groups), axis=-1), np.float32(LEAST_MAGNITUDE))
    scale = largest / np.float32(LARGEST_CODES[out_dtype])
    return cast(groups / scale[..., None], out_dtype).reshape(x.shape), scale


def dequantize_rows(codes: NDArray[np.generic], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """What `quantize_rows`' codes stand for."""
    groups = codes.astype(np.float32).reshape(*scale.shape, -1)
    values: NDArray[np.float32] = (groups * scale[..., None]).reshape(codes.shape)
    return values
