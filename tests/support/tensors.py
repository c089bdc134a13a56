"""Tensors of a Triton request as clients of tensorrtllm_backend shape them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.runtime.tensors.table import INPUTS

NUMPY_TYPES: dict[str, Any] = {
    "TYPE_STRING": object,
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
}
_TYPES = {tensor.name: NUMPY_TYPES[tensor.data_type] for tensor in INPUTS}


def tensors(**inputs: Any) -> dict[str, NDArray[Any]]:
    """A batch of one row: a value is [1, 1], a list [1, n], a list of lists [1, m, n]."""
    return {name: tensor(name, [value]) for name, value in inputs.items()}


def tensor(name: str, rows: list[Any]) -> NDArray[Any]:
    """An input with its batch axis, of the type that config.pbtxt says; text becomes bytes."""
    array = np.array(_encoded(rows), _TYPES.get(name))
    return array.reshape(-1, 1) if array.ndim == 1 else array


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(one) for one in value]
    return value.encode() if isinstance(value, str) else value
