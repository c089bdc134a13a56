"""NCCL's C interface: collectives on any stream, which can be captured in CUDA graphs."""

import ctypes
from typing import ClassVar

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda.device import Seat
from trtc.runtime.executors.cuda.vendor_library import load_vendor_library

_ID_BYTES = 128
_SUCCESS = 0
_SUM = 0
_TYPES = {"i8": 0, "f16": 6, "f32": 7, "bf16": 9}
"""ncclDataType_t"""


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_: ClassVar = [("internal", ctypes.c_char * _ID_BYTES)]


def make_rendezvous() -> bytes:
    """NCCL's unique id of a group; made by rank 0 and passed to all ranks.

    Raises:
        EnvironmentFault: NCCL is missing, or cannot connect processes.
    """
    library, unique = _load(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


class NcclCommunicator:
    """One rank's communicator. Calls enqueue work; all ranks make the same calls in one order."""

    def __init__(self, seat: Seat) -> None:
        """Connect to the other ranks, on the current CUDA device; blocks until all have connected.

        Raises:
            EnvironmentFault: NCCL is missing, or cannot connect the GPUs.
        """
        self._library = _load()
        self._communicator = ctypes.c_void_p()
        unique = _UniqueId.from_buffer_copy(seat.rendezvous)
        status = self._library.ncclCommInitRank(
            ctypes.byref(self._communicator), seat.ranks, unique, seat.rank
        )
        _check(self._library, status)

    def all_reduce(
        self, source: int, target: int, num_elements: int, dtype: str, stream: int
    ) -> None:
        """target = the sum of all ranks' source; device addresses, which may be equal."""
        status = self._library.ncclAllReduce(
            source, target, num_elements, _TYPES[dtype], _SUM, self._member, stream
        )
        _check(self._library, status)

    def all_gather(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        """target = the source of all ranks, concatenated."""
        status = self._library.ncclAllGather(
            source, target, num_bytes, _TYPES["i8"], self._member, stream
        )
        _check(self._library, status)

    def abort(self) -> None:
        """Destroy the communicator, and end kernels that wait for other ranks. Thread-safe.

        It does not wait for other ranks, so it also serves for an orderly shutdown.
        """
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._library.ncclCommAbort(communicator)

    @property
    def _member(self) -> ctypes.c_void_p:
        if not self._communicator:
            raise EnvironmentFault("this rank has left its group")
        return self._communicator


def _load() -> ctypes.CDLL:
    """The library with its functions' types."""
    library = load_vendor_library("nccl")
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.argtypes = [number]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != _SUCCESS:
        text: bytes = library.ncclGetErrorString(status)
        raise EnvironmentFault(
            text.decode(), field="NCCL", remedy="Run it with NCCL_DEBUG=WARN, which logs more"
        )
