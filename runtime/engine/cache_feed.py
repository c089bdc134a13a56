"""Passes events of cached pages from an engine's thread to another thread.

    PrefixCache, HostTier ──► CacheFeed: book of cached pages ──► take ──► EventLog
    (engine's thread)                    events since the last take        (its own thread)

The engine's thread never waits: it adds each event to the book and to a list. If the list is full
it is dropped, and the next `take` returns the whole book instead, so that readers never keep a
stale state.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from trtc.runtime.scheduling.cache_events import PageKey

POOL = "GPU"
"""Medium of pages in the KV pool, also on CPUs: vLLM's name for the memory that kernels read."""
HOST = "CPU"
"""Medium of pages in the host tier."""
MAX_EVENTS = 1 << 16


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A page was cached. Structs take a third of the time that named tuples take to make."""

    key: PageKey
    parent: PageKey
    token_ids: Sequence[int]
    group: int
    medium: str


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A page was evicted."""

    key: PageKey
    group: int
    medium: str


@dataclass(frozen=True)
class Taken:
    """Result of `take`."""

    events: list[Stored | Removed]
    """Events since the last call, in order; [] if events were lost."""
    book: list[Stored] | None
    """All cached pages, if requested or if events were lost; else None."""
    has_lost: bool


class CacheFeed:
    """A queue of events from one thread to another (implements CacheListener and TierWatcher).

    Args:
        has_tier: whether evicted pages may be kept in the host tier.
        max_events: most events that wait to be taken.
    """

    def __init__(self, *, has_tier: bool, max_events: int = MAX_EVENTS) -> None:
        self._has_tier = has_tier
        self._max_events = max_events
        self._evicted: dict[tuple[PageKey, int], Stored] = {}
        """Pages evicted since the tier last reported which of them it keeps."""
        self.num_lost = 0
        """Events that were dropped because the list was full."""
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
            whole: also return the book, as of the last event.
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
