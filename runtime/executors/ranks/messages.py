"""The messages between rank 0 and the other ranks: MessagePack records, never pickle.

Every rank makes the same calls of its executor in the same order, sampling included. All ranks have
the complete logits, and a draw depends on the request's seed only, so all draw the same tokens, and
each has the next step's tokens on its own device.
"""

import zlib
from collections.abc import Mapping
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
"""Fields of SamplingBatch that are records of arrays."""


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
    """The device's id for connecting collectives."""


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    number: int
    """Number of the step, from 1."""
    batch: Arrays
    sampling: Arrays


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Launch a step up to its logits; Draw follows before the next step."""

    number: int
    batch: Arrays


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    number: int
    """Number of the step that was launched last."""
    sampling: Arrays


class Logits(msgspec.Struct, frozen=True, tag="logits"):
    number: int
    batch: Arrays


class CopyPages(msgspec.Struct, frozen=True, tag="copy"):
    sources: list[int]
    targets: list[int]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Free all resources and exit."""


Order = Open | Launch | Forward | Draw | Logits | CopyPages | Close

# The ranks' answers.


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process has started and has its device."""

    free_bytes: int
    """Free bytes of device memory."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The engine is loaded."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of a rank; sent periodically, not for each step."""

    begun: int
    """The last step that was launched."""
    ended: int
    """The last step that was completed."""
    digest: int
    """Digest of all tokens drawn up to that step."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of a rank that has failed."""

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
        """The original error, with the place where it happened."""
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
    """A record of arrays as named arrays; None is left out."""
    packed: Arrays = {}
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if isinstance(value, SparseRows | RowMasks):
            packed |= {f"{field}.{name}": array for name, array in pack(value).items()}
        elif value is not None:
            packed[field] = Array(value.dtype.name, value.shape, value.tobytes())
    return packed


def unpack(kind: type[T], packed: Arrays) -> T:
    """The inverse of `pack`. The arrays are read-only.

    Raises:
        KeyError, TypeError, ValueError: `packed` is not such a record.
    """
    arrays: dict[str, Any] = {name: _array(array) for name, array in packed.items()}
    nested: dict[str, Any] = {
        group: record(**{one: arrays.pop(f"{group}.{one}") for one in record.__struct_fields__})
        for group, record in _NESTED.items()
        if f"{group}.rows" in arrays
    }
    return kind(**arrays, **nested)


def _array(array: Array) -> NDArray[Any]:
    return np.frombuffer(array.data, _DTYPES[array.dtype]).reshape(array.shape)


def digest(tokens: SampledTokens, before: int) -> int:
    """A digest of drawn tokens, chained to the digest `before`. Rows with invalid logits are left
    out, because they may draw any token."""
    token_ids = tokens.token_ids.copy()
    token_ids[list(tokens.invalid_rows)] = 0
    return zlib.crc32(token_ids.tobytes(), before)
