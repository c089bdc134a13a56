"""Decodes and encodes tensors of clients: KServe's datatypes, shapes, bytes and lists of values.

A tensor's name, datatype, shape and size are checked before it is read. Numbers may have another
width than in the table, as from older clients of tensorrtllm_backend; ranges of values are checked
with the request.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.tensors.table import INPUTS, OUTPUTS, DataType, Tensor

MAX_STRINGS = 1 << 14
"""Most strings of one tensor: each becomes a Python object."""
_LENGTH = struct.Struct("<I")
"""Length prefix of each string of a tensor of BYTES."""

_NUMPY: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
_INTEGERS = tuple(name for name in _NUMPY if "INT" in name)
_FLOATS = ("FP32", "FP16", "FP64")

ACCEPTED: Mapping[DataType, tuple[str, ...]] = {
    "TYPE_STRING": ("BYTES",),
    "TYPE_BOOL": ("BOOL",),
    "TYPE_INT32": _INTEGERS,
    "TYPE_UINT64": _INTEGERS,
    "TYPE_FP16": _FLOATS,
    "TYPE_FP32": _FLOATS,
}
"""Type in the table -> datatypes in which the input may be sent."""
_LEAST = {name: int(np.iinfo(_NUMPY[name]).min) for name in _INTEGERS}
_MOST = {name: int(np.iinfo(_NUMPY[name]).max) for name in _INTEGERS}

_INPUTS = {tensor.name: tensor for tensor in INPUTS}
_OUTPUTS = {tensor.name: tensor for tensor in OUTPUTS}


def datatype(tensor: Tensor) -> str:
    """KServe's name of the table's type."""
    name = tensor.data_type.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def input_datatype(name: str) -> str | None:
    """KServe's datatype of an input; None: there is no such input."""
    return datatype(_INPUTS[name]) if name in _INPUTS else None


def output_datatype(name: str) -> str:
    return datatype(_OUTPUTS[name])


def array_of_bytes(name: str, sent_as: str, shape: Sequence[int], data: bytes) -> NDArray[Any]:
    """An input from its bytes: little-endian numbers, or strings with length prefixes.

    Args:
        sent_as: its datatype.
        shape: its shape, with the batch axis.

    Raises:
        InvalidRequestError: the input is unknown, or has another datatype, shape or size.
    """
    count = check_input(name, sent_as, shape)
    if sent_as == "BYTES":
        return _shaped(_strings(name, data, count), shape)
    dtype = np.dtype(_NUMPY[sent_as])
    if len(data) != count * dtype.itemsize:
        raise _wrong_size(name, f"{len(data)} bytes", f"{count * dtype.itemsize} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def array_of_values(
    name: str, sent_as: str, shape: Sequence[int], values: Sequence[Any]
) -> NDArray[Any]:
    """An input from its values in row-major order; strings are bytes.

    Raises:
        InvalidRequestError: the input is unknown, or has another datatype, shape or size.
    """
    count = check_input(name, sent_as, shape)
    if len(values) != count:
        raise _wrong_size(name, f"{len(values)} values", f"{count} values")
    if not all(_is_a(sent_as, value) for value in values):
        raise InvalidRequestError(
            f"has a value that is not {sent_as}", field=name, remedy=f"Send {sent_as} values"
        )
    if sent_as == "BYTES":
        return _shaped(values, shape)
    return np.array(values, _NUMPY[sent_as]).reshape(shape)


def bytes_of(array: NDArray[Any]) -> bytes:
    """An output's bytes, in the format of `array_of_bytes`."""
    if array.dtype != np.object_:
        return array.tobytes()
    return b"".join(_LENGTH.pack(len(text)) + text for text in array.reshape(-1).tolist())


def check_outputs(names: Sequence[str]) -> frozenset[str]:
    """The requested outputs; empty: all.

    Raises:
        InvalidRequestError: one is unknown.
    """
    for name in names:
        if name not in _OUTPUTS:
            raise InvalidRequestError(
                f"{name[:100]!r} is no output of the model",
                field="outputs",
                remedy=f"Ask for some of: {', '.join(_OUTPUTS)}",
            )
    return frozenset(names)


def check_input(name: str, sent_as: str, shape: Sequence[int]) -> int:
    """Check an input's datatype and shape; returns the number of its elements.

    Raises:
        InvalidRequestError: the input is unknown, or has another datatype or shape.
    """
    tensor = _INPUTS.get(name)
    if tensor is None:
        raise InvalidRequestError(
            f"{name[:100]!r} is no input of the model",
            field="inputs",
            remedy="Send those that the model's metadata lists",
        )
    accepted = ACCEPTED[tensor.data_type]
    if sent_as not in accepted:
        raise InvalidRequestError(
            f"is {sent_as[:100]!r}", field=name, remedy=f"Send {datatype(tensor)}"
        )
    wanted = (-1, *tensor.dims)
    fits = len(shape) == len(wanted) and all(
        have >= 0 and want in (-1, have) for have, want in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise InvalidRequestError(
            f"has the shape {list(shape)[:8]}",
            field=name,
            remedy=f"Send {list(wanted)}, of which the first is the batch",
        )
    count = math.prod(shape)
    if sent_as == "BYTES" and count > MAX_STRINGS:
        raise InvalidRequestError(
            f"has {count} strings", field=name, remedy=f"Send at most {MAX_STRINGS}"
        )
    return count


def _is_a(sent_as: str, value: object) -> bool:
    if sent_as == "BYTES":
        return isinstance(value, bytes)
    if sent_as == "BOOL":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if sent_as in _FLOATS:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)
    return isinstance(value, int) and _LEAST[sent_as] <= value <= _MOST[sent_as]


def _strings(name: str, data: bytes, count: int) -> list[bytes]:
    texts, at = list[bytes](), 0
    while at < len(data) and len(texts) < count:
        if at + _LENGTH.size > len(data):
            break
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        texts.append(data[at : at + length])
        at += length
    if at != len(data) or len(texts) != count:
        raise InvalidRequestError(
            f"does not hold {count} strings",
            field=name,
            remedy="Send each after its length, in four little-endian bytes",
        )
    return texts


def _shaped(texts: Sequence[Any], shape: Sequence[int]) -> NDArray[Any]:
    array = np.empty(len(texts), np.object_)
    array[:] = texts
    return array.reshape(shape)


def _wrong_size(name: str, have: str, want: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"has {have}", field=name, remedy=f"Its shape and datatype need {want}"
    )


def refuse_parameters(place: str, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters of a tensor, which request shared memory or classification.

    Raises:
        InvalidRequestError: there is one; names it, with the prefix `place`.
    """
    for name in parameters:
        raise InvalidRequestError(
            "is not supported",
            field=f"{place}.parameters.{name[:100]}",
            remedy="Leave it out: tensors travel in the messages, whole",
        )
