"""What happens to cached pages, on its way from an engine's thread to another one.

    PrefixCache, HostTier ──► CacheFeed: book of what is cached ──► take ──► EventLog
    (engine's thread)                    events since the last take          (its own thread)

The engine's thread never waits: it notes an event in the book and in a list. Once the list is full
it is dropped, and the next `take` gives the whole book instead, so that nobody is left with a wrong
idea of what is cached.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from trtc.runtime.scheduling.cache_events import PageKey

POOL = "GPU"
"""Pages of the KV pool, whatever the engine runs on: vLLM's name of where kernels read."""
HOST = "CPU"
"""Pages of the tier in the host's memory."""
MAX_EVENTS = 1 << 16


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A page can be found. Structs are made in a third of the time that named tuples take."""

    key: PageKey
    parent: PageKey
    token_ids: Sequence[int]
    group: int
    medium: str


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A page cannot be found any more."""

    key: PageKey
    group: int
    medium: str


@dataclass(frozen=True)
class Taken:
    """The events so far."""

    events: list[Stored | Removed]
    """Since the last time, in order; after a loss none."""
    book: list[Stored] | None
    """All that is cached, if asked for, or if events were lost."""
    has_lost: bool


class CacheFeed:
    """Implements CacheListener and TierWatcher. One thread takes the events of another.

    Args:
        has_tier: whether pages that are evicted may be kept in the host's memory.
        max_events: that wait to be taken.
    """

    def __init__(self, *, has_tier: bool, max_events: int = MAX_EVENTS) -> None:
        self._has_tier = has_tier
        self._max_events = max_events
        self._evicted: dict[tuple[PageKey, int], Stored] = {}
        """Since the tier last said what it keeps of them."""
        self.num_lost = 0
        """Events that were never taken one by one."""
        self.arrived = threading.Event()
        """Set while there is something to take."""
        # Shared between threads, under the lock.
        self._lock = threading.Lock()
        self._book: dict[tuple[str, PageKey, int], Stored] = {}
        self._events: list[Stored | Removed] = []
        self._has_lost = False

    # The engine's thread.

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        self._store(Stored(key, parent, token_ids, group, POOL))

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        stored = self._remove(key, group, POOL)
        if self._has_tier:
            self._evicted[key, group] = stored

    def saved(self, names: Sequence[tuple[PageKey, int]]) -> None:
        for name in names:
            one = self._evicted[name]
            self._store(Stored(one.key, one.parent, one.token_ids, one.group, HOST))
        self._evicted.clear()

    def dropped(self, name: tuple[PageKey, int]) -> None:
        self._remove(*name, HOST)

    # Another thread.

    def take(self, *, whole: bool = False) -> Taken:
        """The events since the last call.

        Args:
            whole: give the book as well, as it is after the last event.
        """
        with self._lock:
            self.arrived.clear()
            events, self._events = self._events, []
            has_lost, self._has_lost = self._has_lost, False
            book = list(self._book.values()) if whole or has_lost else None
        return Taken(events, book, has_lost)

    def _store(self, stored: Stored) -> None:
        with self._lock:
            self._book[stored.medium, stored.key, stored.group] = stored
            self._add(stored)

    def _remove(self, key: PageKey, group: int, medium: str) -> Stored:
        with self._lock:
            stored = self._book.pop((medium, key, group))
            self._add(Removed(key, group, medium))
        return stored

    def _add(self, event: Stored | Removed) -> None:
        if self._has_lost:
            self.num_lost += 1
            return
        if not self._events:
            self.arrived.set()
        self._events.append(event)
        if len(self._events) > self._max_events:
            self.num_lost += len(self._events)
            self._events = []
            self._has_lost = True
