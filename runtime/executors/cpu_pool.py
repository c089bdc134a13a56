"""The KV pool of a CPU engine: one mapping, whose memory the system commits on first access.

The first access to a huge page zeroes 2 MB, in every region at once; on a virtual machine whose
host must find the memory first, that made one step in seven take 90 ms longer. So a thread of low
priority touches memory ahead of its use. With a quick start the first step touches small pages,
which that thread converts to huge ones afterwards.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import EnvironmentFault
from trtc.protos.kv import CacheLayout
from trtc.runtime.executors.huge_pages import advise_huge_pages
from trtc.runtime.host.background import lower_priority

_HUGE_PAGE = 1 << 21
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: commit the memory of a range without changing its contents."""
_MADV_COLLAPSE = 25
"""Linux 6.1: move a range's contents to huge pages."""


class KvPool:
    """All pages: for each region of the layout an array [num_pages, bytes of a page in it]."""

    def __init__(self, kv: CacheLayout, num_pages: int, ahead_bytes: int) -> None:
        """
        Args:
            ahead_bytes: bytes of the pool that are touched ahead of the used ones.

        Raises:
            EnvironmentFault: the system refuses the mapping.
        """
        try:
            # Private, because shared memory gets no huge pages, and attention would read many
            # small ones.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, num_pages * kv.page_bytes, flags=flags)
        except OSError as error:
            raise EnvironmentFault(
                f"no memory for a KV pool of {num_pages * kv.page_bytes / 1e9:.2f} GB",
                field="--kv-bytes",
                remedy="Give a smaller pool",
            ) from error
        memory = np.frombuffer(self._memory, np.uint8)
        ends = list(accumulate(num_pages * size for size in kv.region_bytes))
        self._page_bytes = kv.page_bytes
        self._regions = [region.reshape(num_pages, -1) for region in np.split(memory, ends[:-1])]
        self.pointers = np.array([one.ctypes.data for one in self._regions], np.uint64)
        """[regions] address of each region, for the step ABI."""
        self._ahead = -(-ahead_bytes // kv.page_bytes)
        block = max(1, _HUGE_PAGE // min(kv.region_bytes))
        self._toucher = _Toucher(num_pages, block, self._touch)
        self._num_small: int | None = None
        """Pages used before huge pages were requested; None: not requested yet."""

    def touch_ahead(self, page: int) -> None:
        """Touch some pages from `page` on in the background; all pages before it have been used.

        The scheduler allocates pages in order, so unused pages are behind all used ones. Memory
        touched before the first call is in small pages.
        """
        if self._num_small is None:
            self._num_small = page
            advise_huge_pages(self._memory)
        self._toucher.go_to(page + self._ahead)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for region in self._regions:
            region[list(targets)] = region[list(sources)]

    def read_pages(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """[number of pages, bytes of a page in all regions]"""
        data = np.empty((len(pages), self._page_bytes), np.uint8)
        for row, page in zip(data, pages, strict=True):
            np.concatenate([region[page] for region in self._regions], out=row)
        return data

    def write_pages(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        begin = 0
        for region in self._regions:
            end = begin + region.shape[1]
            for row, page in zip(data, pages, strict=True):
                region[page] = row[begin:end]
            begin = end

    def close(self) -> None:
        self._toucher.close()
        self._regions.clear()
        self._memory.close()

    def _touch(self, begin: int, end: int) -> bool:
        """Commit the memory of pages [begin, end) in all regions; False: not supported here."""
        madvise = _madvise()
        base, *_ = addresses = self.pointers.tolist()
        for address, region in zip(addresses, self._regions, strict=True):
            size = region.shape[1]
            # The mapping begins at a page boundary, so no memory before it is touched.
            first = (address + begin * size) & -mmap.PAGESIZE
            if madvise(first, address + end * size - first, _MADV_POPULATE_WRITE):
                return False
            if begin < (self._num_small or 0):
                # If the kernel cannot do it now, khugepaged does it later.
                lowest = max(base, first & -_HUGE_PAGE)
                madvise(lowest, address + end * size - lowest, _MADV_COLLAPSE)
        return True


class _Toucher:
    """Touches pages in order, up to the last requested one, in a thread of its own."""

    def __init__(self, num_pages: int, block: int, touch: Callable[[int, int], bool]) -> None:
        """
        Args:
            block: pages that are touched at once.
            touch: called with [begin, end); False ends the thread.
        """
        self._num_pages = num_pages
        self._block = block
        self._touch = touch
        self._done = self._goal = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def go_to(self, page: int) -> None:
        """Request that all pages before this one are touched."""
        goal = min(page, self._num_pages)
        if goal <= self._goal:
            return
        with self._changed:
            self._goal = goal
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trtc-kv-pool", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while self._done < self._num_pages:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._done < self._goal)
                if self._closed:
                    return
            end = min(self._done + self._block, self._num_pages)
            if not self._touch(self._done, end):
                return
            self._done = end


def _madvise() -> Callable[[int, int, int], int]:
    """madvise of the C library: mmap.madvise does not have these flags, and holds the GIL."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
