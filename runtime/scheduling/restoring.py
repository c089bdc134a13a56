"""Restores evicted pages from a store, such as the host tier, before a step is planned.

    plan -> admissions -> restore pages of their prompts from the store -> plan again

A prefix is a hit if pool and store together have every page of its full groups, and those pages of
its window groups that the next token attends to. Restored pages become idle pages of the prefix
cache, where the second plan finds them. They take pages that the first plan would have given to the
same prompts, so that those still fit.

If other sequences run, restoring stops when its time is up, and the sequence waits for the rest of
its pages while they run: the second plan does not admit it, and the next step restores more. Each
step restores at least one copy's pages. A sequence is among the admissions of a plan only if more
pages are available than its whole prompt needs, and what was restored is used again each time, so
that the pages of other sequences are evicted first.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import NamedTuple, Protocol

from trtc.runtime.requests.principal import Namespace
from trtc.runtime.scheduling.cache_events import CacheEvents, PageKey
from trtc.runtime.scheduling.prefix_cache import NO_PAGE, Node
from trtc.runtime.scheduling.scheduler_state import SchedulerState
from trtc.runtime.scheduling.sequence import Sequence
from trtc.runtime.scheduling.step_plan import Admission

_STORED = -2
"""In place of a page's number: the store has the page."""


class KeptPages(Protocol):
    """Contents of pages, which the store keeps until they are written."""

    def write(self, begin: int, pages: Items[int]) -> None:
        """Write those from index `begin` on into as many pages of the pool, which were allocated
        just now."""
        ...


class PageStore(Protocol):
    """Keeps the contents of evicted pages."""

    @property
    def pages_per_copy(self) -> int: ...

    def has(self, key: PageKey, group: int) -> bool: ...

    def take(self, wanted: Items[tuple[PageKey, int]]) -> KeptPages:
        """Contents of pages that it has; counts as a use of them."""
        ...


class Restored(NamedTuple):
    """What a call of `PrefixRestorer.restore` has changed."""

    any_pages: bool
    """Whether pages were restored, so that the step must be planned again."""
    unfinished: Sequence | None
    """The sequence whose other pages are still to be restored: neither it nor those behind it are
    admitted yet."""


_NOTHING = Restored(any_pages=False, unfinished=None)


class _Link(NamedTuple):
    """A page of a prompt's tokens."""

    tokens: tuple[int, ...]
    name: PageKey
    pages: list[int]
    """For each group, its page in the pool, _STORED or NO_PAGE."""


class PrefixRestorer:
    """Restores pages of a plan's admissions from the store. For the scheduler's thread."""

    def __init__(self, state: SchedulerState, events: CacheEvents, store: PageStore) -> None:
        """
        Args:
            events: events of the state's prefix cache; the store is one of their listeners.
        """
        self._state = state
        self._cache = state.cache
        self._events = events
        self._store = store
        self.num_tokens = 0
        """Prompt tokens of admissions that were found thanks to the store."""

    def restore(self, admissions: Items[Admission], until: float | None = None) -> Restored:
        """Restore pages for these admissions.

        Args:
            until: time.perf_counter() at which to stop after the current copy; None: never.
        """
        if all(len(self._path(one.sequence)) <= len(one.matched) for one in admissions):
            return _NOTHING
        # Restored pages must not evict pages that the plan relies on.
        tables = [self._cache.claim(one.matched) for one in admissions]
        any_pages, unfinished = False, None
        for one in admissions:
            num_pages, is_whole = self._bring_back(one.sequence, until)
            any_pages = any_pages or num_pages > 0
            if not is_whole:
                unfinished = one.sequence
                break
        for one, table in zip(admissions, tables, strict=True):
            for pages, first in zip(table, self._cache.first_wanted(one.matched), strict=True):
                self._cache.release(pages[first:])
        return Restored(any_pages, unfinished)

    def _path(self, sequence: Sequence) -> list[_Link]:
        """The longest prefix that pool and store can serve; [] if there is none."""
        if not self._cache.enabled or sequence.scores_prompt:
            return []
        links: list[_Link] = []
        for link in self._links(sequence):
            if any(
                window is None and page == NO_PAGE
                for window, page in zip(self._cache.pool.windows, link.pages, strict=True)
            ):
                break
            links.append(link)
        end = self._cache.longest_hit(
            len(links), lambda index, group: links[index].pages[group] != NO_PAGE
        )
        return links[:end]

    def _links(self, sequence: Sequence) -> Iterator[_Link]:
        """Links of all pages of a sequence's tokens that may be matched."""
        size, token_ids = self._cache.pool.page_size, sequence.token_ids
        root = self._cache.root(self._state.namespace(sequence))
        node: Node | None = root
        name = self._cache.name(root)
        for begin in range(0, self._cache.longest_match(len(token_ids)) * size, size):
            tokens = tuple(token_ids[begin : begin + size])
            node = node.children.get(tokens) if node is not None else None
            name = self._events.key_after(name, tokens) if node is None else node.name
            known = [NO_PAGE] * len(self._cache.pool.windows) if node is None else node.pages
            pages = [
                _STORED if page == NO_PAGE and self._store.has(name, group) else page
                for group, page in enumerate(known)
            ]
            yield _Link(tokens, name, pages)

    def _bring_back(self, sequence: Sequence, until: float | None) -> tuple[int, bool]:
        """Restore pages of a sequence; returns how many, and False if others are left for the next
        step."""
        path, namespace = self._path(sequence), self._state.namespace(sequence)
        num_matched = len(self._cache.match(sequence.token_ids, namespace))
        missing, held = self._missing(path)
        for pages in held:
            self._cache.hold(pages)
        restored: list[int] = []
        if 0 < len(missing) <= self._cache.num_available:
            kept = self._store.take([(path[index].name, group) for index, group in missing])
            for begin, end in _copies(missing, self._store.pages_per_copy):
                pages = self._cache.allocate(end - begin)
                kept.write(begin, pages)
                found = dict(zip(missing[begin:end], pages, strict=True))
                self._insert(path[: missing[end - 1][0] + 1], namespace, found)
                restored += pages
                if until is not None and time.perf_counter() >= until:
                    break
        self._cache.release(restored)
        for pages in held:
            self._cache.release(pages)
        if restored:
            num_more = len(self._cache.match(sequence.token_ids, namespace)) - num_matched
            self.num_tokens += num_more * self._cache.pool.page_size
        return len(restored), len(restored) in (0, len(missing))

    def _missing(self, path: list[_Link]) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """(index, group) of each page that the pool lacks, the prompt's first ones first; and for
        each group the pages that it has."""
        length = len(path) * self._cache.pool.page_size
        missing: list[tuple[int, int]] = []
        held: list[list[int]] = []
        for group, window in enumerate(self._cache.pool.windows):
            first = self._cache.pool.num_outside(window, length)
            pages = [link.pages[group] for link in path[first:]]
            missing += [(at, group) for at, page in enumerate(pages, first) if page == _STORED]
            held.append([page for page in pages if page != _STORED])
        return sorted(missing), held

    def _insert(
        self, path: list[_Link], namespace: Namespace, found: dict[tuple[int, int], int]
    ) -> None:
        groups = range(len(self._cache.pool.windows))
        node: Node = self._cache.root(namespace)
        for index, link in enumerate(path):
            pages = [found.get((index, group), NO_PAGE) for group in groups]
            node = self._cache.insert(node, link.tokens, pages)


def _copies(missing: Items[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each copy: as many whole pages of tokens as have at most `most` pages of all
    groups, or one. The cache has the pages of all full groups of some tokens, or none."""
    ends = [
        end
        for end in range(1, len(missing) + 1)
        if end == len(missing) or missing[end][0] != missing[end - 1][0]
    ]
    begin = 0
    for end, following in pairwise([*ends, len(missing) + most + 1]):
        if following - begin > most:
            yield begin, end
            begin = end
