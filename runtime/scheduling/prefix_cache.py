"""Keeps the KV pages of past tokens for prompts that begin with the same ones.

A radix tree with one node for the tokens of a full page; an edge is those tokens. A node has a page
for each group of the cache layout:

    root of a namespace ─(5,17,9,2)─ page 8 ─(11,3,3,7)─ page 2          idle: held by no sequence
                                         └──(11,3,4,1)─ page 9

Each namespace has its own tree, so that no client hits the pages of another; the pool and the order
of eviction are shared. A root without children is dropped: a namespace without pages costs nothing.

A sequence that holds a node's page of a full group (one that keeps every token) also holds those of
all its ancestors, and releases the deepest first. So these pages become idle leaf first, `_idle` is
in order of least recent use, and its first page is always a leaf's. Eviction takes from the front,
together with the leaf's pages of other groups.

Pages of a window group become idle one by one as the window moves on. Evicted alone, they leave a
gap (NO_PAGE). A prefix is a hit if every full group has all its pages, every window group those
that the next token attends to, and a state group the snapshot at the prefix's end. A snapshot
becomes idle when its sequence has advanced by a page. Most snapshots are spare: they serve hits,
and are evicted before anything else.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trtc.protos.errors import InvariantError
from trtc.runtime.requests.principal import Namespace
from trtc.runtime.scheduling.kv_pool import RELEASED_PAGE, KvPool

if TYPE_CHECKING:
    from trtc.runtime.scheduling.cache_events import CacheEvents, PageKey

NO_PAGE = -1


class Node:
    """The cached pages of some tokens."""

    __slots__ = ("children", "key", "name", "pages", "parent")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], pages: list[int]) -> None:
        self.parent = parent
        self.name: PageKey = b""
        """Key for listeners; b"": there are no listeners, or it is a root that has had no event."""
        self.key = key
        self.pages = pages
        """Page of each group, or NO_PAGE."""
        self.children: dict[tuple[int, ...], Node] = {}


class Root(Node):
    """The start of one namespace's tree; it has no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, (), [])
        self.namespace = namespace


class PrefixCache:
    """The trees, and allocation of pages, which evicts cached ones.

    The cache holds one reference to each of its pages. All pages are allocated and released through
    it, because it tracks when a cached page has no other holder.
    """

    def __init__(
        self, pool: KvPool, *, enabled: bool = True, events: "CacheEvents | None" = None
    ) -> None:
        """
        Args:
            events: receives every change of the cache; None: there are no listeners.
        """
        self.pool = pool
        self._events = events
        self.enabled = enabled
        self._roots: dict[Namespace, Root] = {}
        """Roots with children."""
        self._windows = pool.windows
        self._has_windows = any(window is not None for window in pool.windows)
        self._keeps_all = None in pool.windows
        """Whether some group is full."""
        self._nodes: dict[int, Node] = {}
        """page -> its node, for every cached page."""
        self._idle: dict[int, Node] = {}
        """Cached pages that no sequence holds, least recently used first."""
        self._spare: dict[int, Node] = {}
        """Idle pages that are evicted before all of `_idle`."""

    @property
    def num_idle(self) -> int:
        """Cached pages that can be evicted."""
        return len(self._idle) + len(self._spare)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return self.pool.num_free + self.num_idle

    def is_idle(self, page: int) -> bool:
        return page in self._idle or page in self._spare

    def num_holders(self, page: int) -> int:
        """Sequences that hold a page."""
        return self.pool.refs[page] - (page in self._nodes)

    def root(self, namespace: Namespace) -> Root:
        """The node under which a namespace's first pages are inserted. Changes nothing."""
        return self._roots.get(namespace) or Root(namespace)

    def match(self, token_ids: Sequence[int], namespace: Namespace) -> list[Node]:
        """Nodes of the longest prefix that all groups have cached in the namespace, in whole
        pages. Changes nothing.

        In models with states it ends before the last token, which is computed from the state before
        it.
        """
        size = self.pool.page_size
        node: Node = self.root(namespace)
        matched: list[Node] = []
        for begin in range(0, self.longest_match(len(token_ids)) * size, size):
            child = node.children.get(tuple(token_ids[begin : begin + size]))
            if child is None:
                break
            matched.append(child)
            node = child
        if self._has_windows:
            end = self.longest_hit(
                len(matched), lambda index, group: matched[index].pages[group] != NO_PAGE
            )
            del matched[end:]
        return matched

    def longest_match(self, num_tokens: int) -> int:
        """The most pages that a match of `num_tokens` tokens may have."""
        return (num_tokens - (0 in self._windows)) // self.pool.page_size

    def longest_hit(self, end: int, has_page: Callable[[int, int], bool]) -> int:
        """Pages of the longest prefix, at most `end`, for which every window group has its last
        pages.

        Args:
            has_page: (index of the page, group) -> whether the page is there.
        """
        shorter = True
        while shorter:  # a shorter prefix may end in a gap of another window group
            before = end
            for group, window in enumerate(self._windows):
                if window is not None:
                    end = self._trim(end, window, group, has_page)
            shorter = end < before
        return end

    def _trim(self, end: int, window: int, group: int, has_page: Callable[[int, int], bool]) -> int:
        """Shorten a prefix until a window group has all of its last pages."""
        size, at = self.pool.page_size, end
        # `at` walks back over present pages; the prefix ends before a gap.
        while at > self.pool.num_outside(window, end * size):
            at -= 1
            if not has_page(at, group):
                end = at
        return end

    def first_wanted(self, matched: Sequence[Node]) -> list[int]:
        """For each group, the index of the first matched node whose page the sequence needs."""
        length = len(matched) * self.pool.page_size
        return [self.pool.num_outside(window, length) for window in self._windows]

    def wanted(self, matched: Sequence[Node]) -> Iterator[int]:
        """The pages that a sequence with this prefix needs."""
        for group, first in enumerate(self.first_wanted(matched)):
            for node in matched[first:]:
                yield node.pages[group]

    def claim(self, matched: Sequence[Node]) -> list[list[int]]:
        """Hold the pages of a matched prefix; returns the page table of each group."""
        tables = []
        for group, first in enumerate(self.first_wanted(matched)):
            held = [node.pages[group] for node in matched[first:]]
            self.hold(held)
            tables.append([RELEASED_PAGE] * first + held)
        return tables

    def hold(self, pages: Sequence[int]) -> None:
        """Hold cached pages, until `release`."""
        for page in pages:
            if self._idle.pop(page, None) is None and self._spare:
                self._spare.pop(page, None)
        self.pool.share(pages)

    def insert(self, parent: Node, key: Sequence[int], pages: list[int]) -> Node:
        """Cache pages, now full, that a sequence holds; returns the node of these tokens.

        Args:
            pages: page of each group, or NO_PAGE; the cache owns the list from now on. If a page of
                these tokens is cached already, because two sequences computed it at the same time,
                the caller's page is released and the caller holds the cached one instead.
        """
        edge = tuple(key)
        assert len(edge) == self.pool.page_size
        if isinstance(parent, Root):  # it may have been dropped, or made a second time
            parent = self._roots.setdefault(parent.namespace, parent)
        node = parent.children.get(edge)
        if node is None:
            node = parent.children[edge] = Node(parent, edge, pages)
            if self._events is not None:
                node.name = self._events.key_after(self.name(parent), edge)
            for group, page in enumerate(pages):
                if page != NO_PAGE:
                    self._keep(node, group, page)
            return node
        for group, page in enumerate(pages):
            known = node.pages[group]
            if page in (known, NO_PAGE):
                continue
            if known == NO_PAGE:
                node.pages[group] = page
                self._keep(node, group, page)
            else:
                self.hold((known,))
                self.release((page,))
        return node

    def _keep(self, node: Node, group: int, page: int) -> None:
        self._nodes[page] = node
        self.pool.share((page,))
        if self._events is not None:
            assert node.parent is not None
            parent = self.name(node.parent)
            self._events.cached(node.name, parent, node.key, group, page)

    def name(self, node: Node) -> "PageKey":
        """A node's key, for listeners; `events` must not be None."""
        if isinstance(node, Root) and not node.name:
            assert self._events is not None
            node.name = self._events.key_of_root(node.namespace)
        return node.name

    def allocate(self, number: int) -> list[int]:
        """Allocate pages, evicting the least recently used cached ones if need be."""
        assert number <= self.num_available, (number, self.num_available)
        while self.pool.num_free < number:
            self._evict_one()
        return self.pool.allocate(number)

    def release(self, pages: Sequence[int], *, spare: bool = False) -> None:
        """Release a sequence's pages of one group, in the sequence's order; cached ones stay, idle.

        Args:
            spare: evict them before all others; not for pages of a full group.
        """
        idle = self._spare if spare else self._idle
        for page in reversed(pages):
            left = self.pool.release(page)
            if left == 1 and (node := self._nodes.get(page)) is not None:
                idle[page] = node

    def clear(self) -> None:
        """Evict every idle page."""
        while self.num_idle:
            self._evict_one()

    def _evict_one(self) -> None:
        page, node = next(iter((self._spare or self._idle).items()))
        group = node.pages.index(page)
        if self._windows[group] is None:
            assert not node.children, f"page {page} is not a leaf"
            for other_group, other in enumerate(node.pages):
                if other != NO_PAGE:
                    self._forget(node, other_group)
            self._remove(node)
            return
        self._forget(node, group)
        if not self._keeps_all:
            self._prune(node)

    def _forget(self, node: Node, group: int) -> None:
        page, node.pages[group] = node.pages[group], NO_PAGE
        del (self._spare if page in self._spare else self._idle)[page]
        del self._nodes[page]
        self.pool.release(page)
        if self._events is not None:
            self._events.evicted(node.name, group, page)

    def _prune(self, node: Node) -> None:
        """Drop a node that has neither pages nor children, and then its ancestors likewise."""
        while node.parent is not None and not node.children:
            if any(page != NO_PAGE for page in node.pages):
                return
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]

    def check_integrity(self, holdings: Sequence[Sequence[int]]) -> None:
        """Check that the trees and the pool agree with the pages that sequences hold.

        Raises:
            InvariantError: they do not.
        """
        for _ in self.integrity_checks(holdings):
            pass

    def integrity_checks(self, holdings: Sequence[Sequence[int]]) -> Iterator[None]:
        """The same in parts of a few milliseconds at most, however many pages are cached."""
        yield from self.pool.integrity_checks([*holdings, list(self._nodes)])
        held = {page for pages in holdings for page in pages}
        if self._idle.keys() | self._spare.keys() != self._nodes.keys() - held:
            raise InvariantError("the idle pages are not the cached pages without a holder")
        reached: dict[int, Node] = {}
        if any(not root.children for root in self._roots.values()):
            raise InvariantError("an empty namespace is kept")
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                pages = [page for page in child.pages if page != NO_PAGE]
                is_empty = not pages and not child.children
                if child.parent is not node or child.key != key or is_empty:
                    raise InvariantError(f"the prefix tree is broken at pages {pages}")
                if len(set(pages)) < len(pages) or not reached.keys().isdisjoint(pages):
                    raise InvariantError(f"pages {pages} are in the prefix trees twice")
                self._check_parent(child, node, held)
                reached |= dict.fromkeys(pages, child)
                stack.append(child)
            yield
        if reached != self._nodes:
            raise InvariantError("the prefix trees do not hold exactly the cached pages")

    def _check_parent(self, child: Node, parent: Node, held: set[int]) -> None:
        for group, window in enumerate(self._windows):
            page = child.pages[group]
            if window is not None:
                continue
            if page == NO_PAGE:
                raise InvariantError("a group that keeps every token has a gap")
            if page in held and parent.parent is not None and parent.pages[group] not in held:
                raise InvariantError(f"page {page} is held without its parent")
