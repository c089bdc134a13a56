"""Keeps the KV pages of past tokens for prompts that begin with the same ones.

A radix tree with one node a full page; an edge is the page's tokens:

    root ─(5,17,9,2)─ page 8 ─(11,3,3,7)─ page 2          idle: held by no sequence
                          └──(11,3,4,1)─ page 9

Whoever holds a node's page holds those of all its ancestors, and lets go of the deepest first. So
pages become idle leaf first, the order of `_idle` is that of least recent use, and its first is
always a leaf: eviction takes from the front.
"""

from collections.abc import Iterable, Sequence

from trtc.protos.errors import InvariantError
from trtc.runtime.kv_pool import KvPool


class Node:
    """A cached page."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}


class PrefixCache:
    """The tree, and allocation that evicts from it.

    The cache itself refers to each of its pages once. All pages are allocated and released through
    it, because it must know when a cached page has no other holder.
    """

    def __init__(self, pool: KvPool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = Node(None, (), -1)
        self._nodes: dict[int, Node] = {}
        """page -> node, for every cached page."""
        self._idle: dict[int, Node] = {}
        """Cached pages that no sequence holds, least recently used first."""

    @property
    def num_idle(self) -> int:
        """Cached pages that can be evicted."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return self.pool.num_free + len(self._idle)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def num_holders(self, page: int) -> int:
        """Sequences that hold a page."""
        return self.pool.refs[page] - (page in self._nodes)

    def match(self, token_ids: Sequence[int]) -> list[Node]:
        """Nodes of the longest cached prefix, in whole pages. Changes nothing."""
        size = self.pool.page_size
        node = self.root
        matched = []
        for begin in range(0, len(token_ids) - size + 1, size):
            child = node.children.get(tuple(token_ids[begin : begin + size]))
            if child is None:
                break
            matched.append(child)
            node = child
        return matched

    def claim(self, nodes: Iterable[Node]) -> list[int]:
        """Hold the pages of matched nodes."""
        pages = [node.page for node in nodes]
        for page in pages:
            self._idle.pop(page, None)
        self.pool.share(pages)
        return pages

    def insert(self, parent: Node, key: Sequence[int], page: int) -> Node:
        """Cache a page, now full, that a sequence holds; the node of these tokens.

        If the tokens are cached already, that node is returned, now held by the caller in place of
        `page`, which is released: two sequences computed the same page at the same time.
        """
        edge = tuple(key)
        assert len(edge) == self.pool.page_size
        known = parent.children.get(edge)
        if known is not None:
            self.claim((known,))
            self.release((page,))
            return known
        node = Node(parent, edge, page)
        parent.children[edge] = node
        self._nodes[page] = node
        self.pool.share((page,))
        return node

    def allocate(self, number: int) -> list[int]:
        """New pages, evicting the least recently used cached ones at need."""
        assert number <= self.num_available, (number, self.num_available)
        while self.pool.num_free < number:
            self._evict_one()
        return self.pool.allocate(number)

    def release(self, pages: Sequence[int]) -> None:
        """A sequence lets go of pages, given in its order; cached ones stay, idle."""
        for page in reversed(pages):
            left = self.pool.release(page)
            if left == 1 and (node := self._nodes.get(page)) is not None:
                self._idle[page] = node

    def clear(self) -> None:
        """Evict every idle page."""
        while self._idle:
            self._evict_one()

    def _evict_one(self) -> None:
        page, node = next(iter(self._idle.items()))
        assert not node.children and node.parent is not None, f"page {page} is not a leaf"
        del self._idle[page]
        del self._nodes[page]
        del node.parent.children[node.key]
        self.pool.release(page)

    def check_integrity(self, holdings: Sequence[Sequence[int]]) -> None:
        """The tree and the pool agree with what the sequences hold.

        Raises:
            InvariantError: they do not.
        """
        self.pool.check_integrity([*holdings, list(self._nodes)])
        held = {page for pages in holdings for page in pages}
        if self._idle.keys() != self._nodes.keys() - held:
            raise InvariantError("the idle pages are not the cached pages without a holder")
        reached = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                if child.parent is not node or child.key != key or child.page in reached:
                    raise InvariantError(f"the prefix tree is broken at page {child.page}")
                if child.page in held and node is not self.root and node.page not in held:
                    raise InvariantError(f"page {child.page} is held without its parent")
                reached[child.page] = child
                stack.append(child)
        if reached != self._nodes:
            raise InvariantError("the prefix tree does not hold exactly the cached pages")
