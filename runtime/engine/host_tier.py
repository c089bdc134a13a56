"""Keeps KV pages that the prefix cache evicts in host memory, up to a number of bytes.

    evicted -> flush: begin to read -> a step is launched, and overwrites the pages
                                    -> the step is complete -> land: their bytes are in the arena
    has, take -> write: into new pages, before the next launch

The least recently used page is dropped for a new one. A page that is restored to the pool also
stays in the tier: if it is evicted again, nothing is copied.
"""

import mmap
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from trtc.protos.errors import EnvironmentFault, RequestError, UnsupportedError
from trtc.runtime.executors.base import Executor, PageRead
from trtc.runtime.executors.huge_pages import advise_huge_pages
from trtc.runtime.host.machine import available_bytes
from trtc.runtime.scheduling.cache_events import CacheEvents, PageKey
from trtc.runtime.scheduling.restoring import PrefixRestorer
from trtc.runtime.scheduling.scheduler_state import SchedulerState

_FIELD = "kv_host_bytes"
_BATCH_BYTES = 16 << 20
"""Most bytes of one copy, which uses as much memory besides the arena."""
_MAX_READS = 4
"""Most copies in flight; another one waits for the device."""


class TierWatcher(Protocol):
    """Notified of the tier's pages, each a (key, group), in the tier's thread."""

    def saved(self, names: Sequence[tuple[PageKey, int]]) -> None:
        """The tier keeps these of the pages evicted since the last call, parents first."""
        ...

    def dropped(self, name: tuple[PageKey, int]) -> None:
        """The tier no longer keeps this page."""
        ...


class _Read(NamedTuple):
    """Pages on their way into slots of the arena."""

    read: PageRead
    slots: list[int]


class _Kept(NamedTuple):
    """Pages that have landed (implements KeptPages)."""

    tier: "HostTier"
    names: Sequence[tuple[PageKey, int]]

    def write(self, begin: int, pages: Sequence[int]) -> None:
        self.tier.put_back(self.names, begin, pages)


class HostTier:
    """See the module (implements CacheListener and PageStore). Not thread-safe."""

    def __init__(
        self, executor: Executor, num_bytes: int, watcher: TierWatcher | None = None
    ) -> None:
        """Reserve the memory; the operating system commits it as it is used.

        Args:
            watcher: notified of the pages that are kept; None: no watcher.

        Raises:
            UnsupportedError: the executor cannot read and write pages.
            RequestError: `num_bytes` is less than one page.
            EnvironmentFault: the machine has less free memory.
        """
        if not executor.moves_pages:
            raise UnsupportedError(
                "an engine of several ranks has a part of each page on every GPU, and keeps none "
                "on the host",
                field=_FIELD,
                remedy="Leave it out",
            )
        page_bytes = executor.kv.page_bytes
        self.num_slots = num_bytes // max(1, page_bytes)
        if not page_bytes or not self.num_slots:
            raise RequestError(
                f"holds no page of {page_bytes} bytes", field=_FIELD, remedy="Give more, or none"
            )
        free = available_bytes()
        if num_bytes > free:
            raise EnvironmentFault(
                f"{num_bytes / 1e9:.2f} GB do not fit the {free / 1e9:.2f} GB of memory that are "
                "free",
                field=_FIELD,
                remedy="Give less",
            )
        self._executor = executor
        self._watcher = watcher
        self._memory = mmap.mmap(
            -1, self.num_slots * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        advise_huge_pages(self._memory)
        arena = np.frombuffer(self._memory, np.uint8)
        self._arena = arena.reshape(self.num_slots, page_bytes)
        self.pages_per_copy = max(1, _BATCH_BYTES // page_bytes)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._slots: OrderedDict[tuple[PageKey, int], int] = OrderedDict()
        """(key, group) -> slot, least recently used first."""
        self._leaving: dict[tuple[PageKey, int], int] = {}
        """Evicted since the last flush -> page."""
        self._reads: deque[_Read] = deque()
        self._num_landed = 0
        self.num_begun = 0
        """Reads begun since the start."""
        self.saved_bytes = 0
        """Bytes copied from the pool."""
        self.restored_bytes = 0
        """Bytes copied back to the pool."""

    @property
    def num_used(self) -> int:
        """Slots that hold a page."""
        return len(self._slots)

    def restorer(self, state: SchedulerState, events: CacheEvents) -> PrefixRestorer:
        """A restorer of kept pages to the prefix cache of `state`, whose events these are."""
        return PrefixRestorer(state, events, self)

    # CacheListener.

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        """Nothing to do: a page is copied when it is evicted."""

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        name = (key, group)
        if name in self._slots:
            self._slots.move_to_end(name)
        else:
            self._leaving[name] = page

    # For the step pipeline.

    def flush(self) -> None:
        """Begin to copy evicted pages, before anything overwrites them."""
        self._save(self.num_slots)

    def land(self, number: int) -> None:
        """Complete the first `number` reads, waiting for them if need be.

        Raises:
            EnvironmentFault: the device failed.
        """
        while self._num_landed < number:
            landing = self._reads.popleft()
            self._arena[landing.slots] = landing.read.wait()
            self._num_landed += 1

    # PageStore.

    def has(self, key: PageKey, group: int) -> bool:
        return (key, group) in self._slots

    def take(self, wanted: Sequence[tuple[PageKey, int]]) -> _Kept:
        slots = {self._slots[name] for name in wanted}
        for number, landing in reversed(list(enumerate(self._reads, self._num_landed + 1))):
            if not slots.isdisjoint(landing.slots):
                self.land(number)
                break
        return _Kept(self, wanted)

    def put_back(
        self, names: Sequence[tuple[PageKey, int]], begin: int, pages: Sequence[int]
    ) -> None:
        """Write kept pages, those of `names` from index `begin` on, into pages of the pool, some of
        which may just have been evicted. No name from `begin` on is dropped for them."""
        left = names[begin:]
        for name in reversed(left):
            self._slots.move_to_end(name)
        self._save(self.num_slots - len(left))
        slots = [self._slots[name] for name in left[: len(pages)]]
        for first in range(0, len(slots), self.pages_per_copy):
            batch = slice(first, first + self.pages_per_copy)
            self._executor.write_pages(pages[batch], self._arena[slots[batch]])
        self.restored_bytes += len(slots) * self._arena.shape[1]

    def _save(self, room: int) -> None:
        """Begin to copy evicted pages, as far as there is room."""
        # Leaves are evicted first, and are worth less than their ancestors.
        leaving = list(self._leaving.items())[max(0, len(self._leaving) - room) :]
        self._leaving.clear()
        slots = [self._free.pop() if self._free else self._drop() for _ in leaving]
        self._slots.update(zip((name for name, _ in leaving), slots, strict=True))
        if self._watcher is not None:
            self._watcher.saved([name for name, _ in reversed(leaving)])
        for begin in range(0, len(leaving), self.pages_per_copy):
            batch = slice(begin, begin + self.pages_per_copy)
            read = self._executor.read_pages([page for _, page in leaving[batch]])
            self._reads.append(_Read(read, slots[batch]))
            self.num_begun += 1
            self.land(self.num_begun - _MAX_READS)
        self.saved_bytes += len(slots) * self._arena.shape[1]

    def _drop(self) -> int:
        """Drop the least recently used page; returns its slot."""
        name, slot = self._slots.popitem(last=False)
        if self._watcher is not None:
            self._watcher.dropped(name)
        return slot
