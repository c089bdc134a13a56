"""The messages between rank 0 and the other ranks: MessagePack records, never pickle.

Every rank does the same: the calls of an executor, in one order, sampling included. The logits are
whole on all of them and a draw depends on the request's seed alone, so all draw the same tokens,
and each knows on its own device what the next step continues with.
"""

import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from trtc.protos import errors
from trtc.protos.step import SPARSE_COLUMNS
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.sampling.masks import RowMasks
from trtc.runtime.sampling.sampler import COLUMN_DTYPES, SampledTokens, SamplingBatch, SparseRows

T = TypeVar("T", StepBatch, SamplingBatch)

_DTYPES: Mapping[str, np.dtype[Any]] = {
    dtype.name: dtype for dtype in map(np.dtype, [*COLUMN_DTYPES.values(), np.uint32])
}
_NESTED: Mapping[str, type[SparseRows | RowMasks]] = {
    **dict.fromkeys((one.name for one in SPARSE_COLUMNS), SparseRows),
    "masks": RowMasks,
}
"""Fields of a SamplingBatch that are records of arrays."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Arrays = dict[str, Array]


# Rank 0's orders.


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Load a rank of an engine that has been verified."""

    engine: str
    rank: int
    num_pages: int
    dummy_weights: bool
    rendezvous: bytes
    """Where the ranks' collectives meet, in the device's own terms."""


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    number: int
    """Of the step, from 1."""
    batch: Arrays
    sampling: Arrays


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Launch a step up to its logits; Draw follows before the next step."""

    number: int
    batch: Arrays


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    number: int
    """Of the step that was launched last."""
    sampling: Arrays


class Logits(msgspec.Struct, frozen=True, tag="logits"):
    number: int
    batch: Arrays


class CopyPages(msgspec.Struct, frozen=True, tag="copy"):
    sources: list[int]
    targets: list[int]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Free everything and end."""


Order = Open | Launch | Forward | Draw | Logits | CopyPages | Close

# The ranks' answers.


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process has started and has its device."""

    free_bytes: int
    """Of device memory."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The engine is loaded."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a rank is; sent periodically, not step by step."""

    begun: int
    """Step that was launched last."""
    ended: int
    """Step that ended last."""
    digest: int
    """Of all tokens drawn up to that one."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last word of a rank that cannot go on."""

    kind: str
    """Class in protos/errors.py."""
    problem: str
    field: str
    remedy: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        if isinstance(error, errors.TrtcError):
            return cls(type(error).__name__, error.problem, error.field, error.remedy)
        text = str(error) or "without a message"
        return cls("EnvironmentFault", f"{type(error).__name__}: {text}", "", "")

    def error(self, where: str) -> errors.TrtcError:
        """The error as it was, and where it happened."""
        kind = _ERRORS.get(self.kind, errors.EnvironmentFault)
        return kind(f"{where}: {self.problem}", field=self.field, remedy=self.remedy)


_ERRORS: Mapping[str, type[errors.TrtcError]] = {
    kind.__name__: kind
    for kind in (
        errors.EngineCorruptError,
        errors.EngineIncompatibleError,
        errors.EnvironmentFault,
        errors.InvariantError,
        errors.RequestError,
    )
}
Answer = Ready | Opened | Progress | Failed


def pack(record: StepBatch | SamplingBatch | SparseRows | RowMasks) -> Arrays:
    """A record of arrays as named arrays; what is None is left out."""
    packed: Arrays = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, SparseRows | RowMasks):
            packed |= {f"{field.name}.{name}": array for name, array in pack(value).items()}
        elif value is not None:
            packed[field.name] = Array(value.dtype.name, value.shape, value.tobytes())
    return packed


def unpack(kind: type[T], packed: Arrays) -> T:
    """The record again. Its arrays are read-only.

    Raises:
        KeyError, TypeError, ValueError: it is not one.
    """
    arrays: dict[str, Any] = {name: _array(array) for name, array in packed.items()}
    nested: dict[str, Any] = {
        group: record(**{one.name: arrays.pop(f"{group}.{one.name}") for one in fields(record)})
        for group, record in _NESTED.items()
        if f"{group}.rows" in arrays
    }
    return kind(**arrays, **nested)


def _array(array: Array) -> NDArray[Any]:
    return np.frombuffer(array.data, _DTYPES[array.dtype]).reshape(array.shape)


def digest(tokens: SampledTokens, before: int) -> int:
    """What equal draws have in common, those `before` included; a row without finite logits may
    draw anything."""
    token_ids = tokens.token_ids.copy()
    token_ids[list(tokens.invalid_rows)] = 0
    return zlib.crc32(token_ids.tobytes(), before)
