"""Which call a process of hooks is at, and since when: in memory that its server shares.

So the server knows what to answer for when the process hangs or ends, although answers to calls
before that one may not have been sent.
"""

import mmap
import os
import struct
import time
from typing import NamedTuple

_FORMAT = struct.Struct("<Qd")


class Running(NamedTuple):
    """A call under way, or the last one."""

    number: int
    """Among all that the process got, from 1; 0: it has begun none."""
    began_at: float
    """time.monotonic()"""


class Progress:
    """One process's; it writes, and its server reads."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor of shared memory that `shared_memory` made."""
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        os.close(descriptor)

    def begin(self, number: int) -> None:
        _FORMAT.pack_into(self._memory, 0, number, time.monotonic())

    def running(self) -> Running:
        while True:  # until it has not been written meanwhile
            found = _FORMAT.unpack_from(self._memory, 0)
            if found == _FORMAT.unpack_from(self._memory, 0):
                return Running(*found)


def shared_memory() -> int:
    """A descriptor of memory for one Progress."""
    descriptor = os.memfd_create("trtc-hooks")
    os.ftruncate(descriptor, _FORMAT.size)
    return descriptor
