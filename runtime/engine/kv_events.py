"""KV events of one engine: numbered batches of stored and removed pages, the last of them kept.

    CacheFeed ──► thread ──► the last batches ──► any number of readers,
                                                  each with its own position

A batch has the events of some milliseconds. A reader that reconnects requests the batches after the
last one that it saw; if those are no longer kept, it gets a snapshot of all cached pages.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trtc.runtime.engine.cache_feed import HOST, POOL, CacheFeed, Removed, Stored
from trtc.runtime.host.background import lower_priority
from trtc.runtime.scheduling.cache_events import PageKey, namespace_name

BATCH_S = 0.005
"""Seconds from the first event of a batch to its end."""
MAX_BATCHES = 10_000
MAX_BLOCKS = 1 << 17
"""Most pages in all batches that are kept."""
BATCH_BLOCKS = 1024
"""Pages in a batch of a snapshot."""


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive pages of a prefix were cached."""

    keys: tuple[PageKey, ...]
    parent: PageKey
    """Key of the page before the first one."""
    token_ids: tuple[int, ...]
    """Tokens of all of them."""
    group: int
    medium: str


@dataclass(frozen=True)
class BlocksRemoved:
    keys: tuple[PageKey, ...]
    group: int
    medium: str


@dataclass(frozen=True)
class AllCleared:
    """All pages were removed; only pages stored after this event are cached."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True)
class Batch:
    number: int
    """From 1 on, without gaps."""
    at: float
    """time.time()"""
    events: tuple[KvEvent, ...]
    num_blocks: int
    """Pages in its events."""


def block_hash(key: PageKey) -> int:
    """Public hash of a page: 63 bits, so that it also fits signed 64-bit integers."""
    return int.from_bytes(key[-8:], "big") >> 1


def kind_of(window: int | None) -> tuple[str, int | None]:
    """vLLM's name for the kind of a group's layers, and the window in tokens."""
    if window is None:
        return "full_attention", None
    return ("mamba", None) if window == 0 else ("sliding_window", window)


class EventLog:
    """Publishes the events of one engine. Start it, and close it once the engine has stopped."""

    def __init__(
        self,
        feed: CacheFeed,
        page_size: int,
        windows: Sequence[int | None],
        shared: bytes,
        *,
        max_batches: int = MAX_BATCHES,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """
        Args:
            windows: windows of the groups of pages, as in KvPool.
            shared: name of the namespace that all clients share.
        """
        self.page_size = page_size
        self.windows = tuple(windows)
        self._shared = shared
        self._feed = feed
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._taking = threading.Lock()
        """Held while events are taken and made into batches, so that a snapshot matches the number
        of the last batch."""
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()
        self._num_blocks = 0
        self._last = 0
        self._is_closing = False
        self.is_closed = False
        """Whether no batches will follow."""
        self._thread = threading.Thread(target=self._run, name="trtc-kv-events", daemon=True)

    def start(self) -> None:
        self._append([(AllCleared(),)])  # clears what a previous engine of this name published
        self._thread.start()

    def close(self) -> None:
        """Publish the remaining events and AllCleared. Idempotent."""
        self._is_closing = True
        self._feed.arrived.set()
        if self._thread.ident is not None:
            self._thread.join()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, which must not block, in the log's thread when there are new batches.

        Returns:
            A function that removes the listener.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def leave() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return leave

    def namespace(self, key: PageKey) -> str:
        """Public name of a key's namespace: a keyed hash, which does not reveal the salt or tenant;
        "": the namespace that all clients share."""
        name = namespace_name(key)
        return "" if name == self._shared else name.hex()

    @property
    def last(self) -> int:
        """Number of the last batch; 0: there was none."""
        return self._last

    def after(self, number: int) -> list[Batch] | None:
        """The batches after the one with this number; None: some are no longer kept, or the number
        is from before a restart of the server."""
        with self._lock:
            first = self._last + 1 - len(self._batches)
            if not first - 1 <= number <= self._last:
                return None
            # From the end: readers that keep up need few.
            return [self._batches[at] for at in range(number - self._last, 0)]

    def snapshot(self) -> list[Batch]:
        """All cached pages as batches, of which the first begins with AllCleared and the last has
        the number of the last batch of the log. Later events are in the batches after that."""
        with self._taking:
            book = self._take(whole=True)
            number = self._last
        events = list(_batches(_parents_first(book), max(BATCH_BLOCKS, _ceil(len(book), number))))
        first = max(0, number - max(0, len(events) - 1))
        made = [self._batch(first + at, one) for at, one in enumerate(events)]
        return [
            Batch(one.number, one.at, (AllCleared(), *one.events), one.num_blocks)
            if not at
            else one
            for at, one in enumerate(made or [self._batch(number, ())])
        ]

    def _run(self) -> None:
        lower_priority()
        while not self._is_closing:
            self._feed.arrived.wait()
            if not self._is_closing:
                time.sleep(BATCH_S)  # collect more events: one batch costs less than many
            self.collect()
        self._append([(AllCleared(),)])
        self.is_closed = True
        self._wake()

    def collect(self) -> None:
        """Make batches of the events since the last call."""
        with self._taking:
            self._take()
        self._wake()

    def _take(self, *, whole: bool = False) -> list[Stored]:
        """Make batches of new events; returns all cached pages if `whole` or if events were lost,
        else []."""
        taken = self._feed.take(whole=whole)
        book = taken.book or []
        if taken.has_lost:
            batches = list(_batches(_parents_first(book), BATCH_BLOCKS))
            self._append([(AllCleared(), *(batches[0] if batches else ())), *batches[1:]])
        else:
            self._append(_batches(_runs(taken.events), BATCH_BLOCKS))
        return book

    def _append(self, batches: Iterable[tuple[KvEvent, ...]]) -> None:
        for events in batches:
            batch = self._batch(self._last + 1, events)
            with self._lock:
                self._batches.append(batch)
                self._last = batch.number
                self._num_blocks += batch.num_blocks
                while len(self._batches) > 1 and (
                    len(self._batches) > self._max_batches or self._num_blocks > self._max_blocks
                ):
                    self._num_blocks -= self._batches.popleft().num_blocks

    def _batch(self, number: int, events: tuple[KvEvent, ...]) -> Batch:
        return Batch(number, time.time(), events, sum(_num_blocks(one) for one in events))

    def _wake(self) -> None:
        for listener in self._listeners:
            listener()


def _num_blocks(event: KvEvent) -> int:
    return 0 if isinstance(event, AllCleared) else len(event.keys)


def _ceil(number: int, parts: int) -> int:
    return -(-number // max(1, parts))


def _batches(events: Iterable[KvEvent], max_blocks: int) -> Iterator[tuple[KvEvent, ...]]:
    """Split events, in order, into the contents of batches."""
    batch: list[KvEvent] = []
    room = max_blocks
    for event in events:
        if batch and _num_blocks(event) > room:
            yield tuple(batch)
            batch, room = [], max_blocks
        batch.append(event)
        room -= _num_blocks(event)
    if batch:
        yield tuple(batch)


def _parents_first(book: Sequence[Stored]) -> Iterator[BlocksStored]:
    """All cached pages as events: pages of the pool first, and parents before children."""
    children: dict[PageKey, list[Stored]] = {}
    held = {(one.key, one.group, one.medium) for one in book}
    for medium in (POOL, HOST):
        children = {}
        tops: list[Stored] = []
        for one in book:
            if one.medium == medium:
                is_top = (one.parent, one.group, medium) not in held
                (tops if is_top else children.setdefault(one.parent, [])).append(one)
        ordered: list[Stored] = []
        stack = tops
        while stack:
            one = stack.pop()
            ordered.append(one)
            stack += [child for child in children.get(one.key, ()) if child.group == one.group]
        for event in _runs(ordered):
            assert isinstance(event, BlocksStored)
            yield event


def _runs(events: Sequence[Stored | Removed]) -> Iterator[KvEvent]:
    """Merge consecutive events. Events of one group and medium stay in order; those of different
    ones are independent."""
    lanes: dict[tuple[bool, int], list[Stored | Removed]] = {}
    for event in events:
        lanes.setdefault((event.medium != POOL, event.group), []).append(event)
    for _, lane in sorted(lanes.items()):
        yield from _runs_of_lane(lane)


def _runs_of_lane(lane: Sequence[Stored | Removed]) -> Iterator[KvEvent]:
    begin = 0
    for end in range(1, len(lane) + 1):
        if end < len(lane) and end - begin < BATCH_BLOCKS and _continues(lane[end - 1], lane[end]):
            continue
        yield _run(lane[begin:end])
        begin = end


def _continues(before: Stored | Removed, event: Stored | Removed) -> bool:
    if isinstance(event, Removed):
        return isinstance(before, Removed)
    return isinstance(before, Stored) and event.parent == before.key


def _run(events: Sequence[Stored | Removed]) -> KvEvent:
    first = events[0]
    keys = tuple(event.key for event in events)
    if isinstance(first, Removed):
        return BlocksRemoved(keys, first.group, first.medium)
    stored = [event for event in events if isinstance(event, Stored)]
    tokens = tuple(token for event in stored for token in event.token_ids)
    return BlocksStored(keys, first.parent, tokens, first.group, first.medium)
