"""The running call of a process of hooks, and since when it runs, in shared memory.

So the server knows which call to fail if the process hangs or exits, although answers to earlier
calls may not have been sent.
"""

import mmap
import os
import struct
import time
from typing import NamedTuple

_FORMAT = struct.Struct("<Qd")


class Running(NamedTuple):
    """The running call, or the last one."""

    number: int
    """Its number among the calls of the process, from 1; 0: none has begun."""
    began_at: float
    """time.monotonic()"""


class Progress:
    """The progress of one process, which writes it; the server reads it."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor of shared memory that `shared_memory` made."""
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        os.close(descriptor)

    def begin(self, number: int) -> None:
        _FORMAT.pack_into(self._memory, 0, number, time.monotonic())

    def running(self) -> Running:
        while True:  # until it was not written during the read
            found = _FORMAT.unpack_from(self._memory, 0)
            if found == _FORMAT.unpack_from(self._memory, 0):
                return Running(*found)


def shared_memory() -> int:
    """A descriptor of memory for one Progress."""
    descriptor = os.memfd_create("trtc-hooks")
    os.ftruncate(descriptor, _FORMAT.size)
    return descriptor
