"""A safetensors file, read without its library: header checked, tensors as views of the mapping.

Format (github.com/huggingface/safetensors): u64 little-endian header length n, n bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, then the data; offsets count from its start.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import msgspec
import numpy as np

from trtc.builder.recipes import Array
from trtc.protos.errors import CheckpointError
from trtc.protos.files import UnreadableError, check_unique_keys, decode_json, open_regular

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a corrupt length must not make the builder read gigabytes of JSON."""

_MAX_NAME_CHARACTERS = 512
_MAX_DIMENSIONS = 16
_MAX_SIZE = 1 << 48
"""Of one dimension: also those of tensors without elements must be sizes."""

_NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, as its header describes it."""

    name: str
    dtype: str
    """As safetensors spells it: BF16, F8_E4M3, ..."""
    shape: tuple[int, ...]
    begin: int
    """Bytes from the start of the file."""
    end: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _NUMPY_DTYPES[self.dtype]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name, every offset proven to lie in it.

    Raises:
        CheckpointError: missing, truncated or corrupt file; unknown element type; tensors that
            overlap, leave gaps or do not match their shape.
    """
    with _opened(path) as file:
        return _read_header(file, path)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Raises: CheckpointError: not a regular file that can be read."""
    remedy = "Check the path and its permissions, or download the checkpoint again"
    try:
        with open_regular(path) as file:
            yield file
    except UnreadableError as error:
        raise CheckpointError(str(error), field=str(path), remedy=remedy) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror})", field=str(path), remedy=remedy
        ) from error


def _read_header(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    file_bytes = os.fstat(file.fileno()).st_size
    header_bytes, text = _header_text(file, file_bytes, path)
    data_begin = 8 + header_bytes
    tensors = [
        _tensor(name, entry, data_begin, path) for name, entry in _entries(text, path).items()
    ]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_coverage(tensors, data_begin, file_bytes, path)
    return {tensor.name: tensor for tensor in tensors}


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(problem, field=str(path), remedy="Download or copy the file again")


def _header_text(file: BinaryIO, file_bytes: int, path: Path) -> tuple[int, bytes]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _damaged(path, f"is truncated: {file_bytes} bytes cannot hold a safetensors header")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > _MAX_HEADER_BYTES:
        raise _damaged(path, f"is not a safetensors file: its header claims {header_bytes} bytes")
    if 8 + header_bytes > file_bytes:
        raise _damaged(
            path,
            f"is truncated: its header has {header_bytes} bytes, the file only {file_bytes}",
        )
    return header_bytes, file.read(header_bytes)


def _entries(text: bytes, path: Path) -> dict[str, _Entry]:
    try:
        raw = decode_json(text, dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: decode_json(bytes(entry), _Entry) for name, entry in raw.items()}
        check_unique_keys(text)
        return entries
    except UnreadableError as error:
        raise _damaged(path, f"has a corrupt header ({error})") from error


def _tensor(name: str, entry: _Entry, data_begin: int, path: Path) -> StoredTensor:
    if len(name) > _MAX_NAME_CHARACTERS:
        raise _damaged(path, f"names a tensor with {len(name)} characters")
    if len(entry.shape) > _MAX_DIMENSIONS or any(size > _MAX_SIZE for size in entry.shape):
        raise _damaged(path, f"tensor {name} has a shape that no tensor has")
    if entry.dtype not in _NUMPY_DTYPES:
        raise CheckpointError(
            f"tensor {name} has element type {entry.dtype!r}, which trtc cannot read",
            field=str(path),
            remedy=f"Save it as one of {', '.join(_NUMPY_DTYPES)}",
        )
    begin, end = entry.data_offsets
    if any(size < 0 for size in entry.shape) or not 0 <= begin <= end:
        raise _damaged(path, f"tensor {name} has shape {entry.shape} at offsets {begin}..{end}")
    expected = math.prod(entry.shape) * _NUMPY_DTYPES[entry.dtype].itemsize
    if end - begin != expected:
        raise _damaged(
            path,
            f"tensor {name} of {entry.dtype} {list(entry.shape)} needs {expected} bytes, "
            f"its offsets {begin}..{end} give {end - begin}",
        )
    return StoredTensor(name, entry.dtype, entry.shape, data_begin + begin, data_begin + end)


def _check_coverage(
    tensors: list[StoredTensor], data_begin: int, file_bytes: int, path: Path
) -> None:
    """The tensors must fill the data section one after the other, as the format demands."""
    position, previous = data_begin, "the header"
    for tensor in tensors:
        if tensor.begin < position:
            raise _damaged(path, f"tensor {tensor.name} overlaps {previous}")
        if tensor.begin > position:
            raise _damaged(
                path, f"{tensor.begin - position} bytes before tensor {tensor.name} are unused"
            )
        if tensor.end > file_bytes:
            raise _damaged(
                path,
                f"is truncated: tensor {tensor.name} ends at byte {tensor.end}, "
                f"the file at {file_bytes}",
            )
        position, previous = tensor.end, tensor.name
    if position != file_bytes:
        raise _damaged(path, f"has {file_bytes - position} bytes after its last tensor")


class MappedFile:
    """The tensors of one file as read-only views of its mapping."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as file:
            self.tensors = _read_header(file, path)
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str) -> Array:
        """A view of the file's pages; nothing is read until its elements are."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        # numpy refuses an offset at the very end, which an empty tensor may have.
        offset = tensor.begin if count else 0
        flat: Array = np.frombuffer(self._mapping, tensor.numpy_dtype, count, offset)
        return flat.reshape(tensor.shape)

    def release(self) -> None:
        """Release all pages; a view that is used after it reads them again."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
