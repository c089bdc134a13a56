"""Who hears all that the prefix cache tells, and rebuilds from it what is cached."""

from collections.abc import Iterator, Sequence

from trtc.runtime.scheduling.cache_events import PageKey
from trtc.runtime.scheduling.prefix_cache import NO_PAGE, Node, PrefixCache

Cached = tuple[tuple[int, ...], int]
"""The tokens up to a page's last one, and its group."""


class CacheBook:
    """Implements CacheListener."""

    def __init__(self) -> None:
        self.pages: dict[tuple[PageKey, int], int] = {}
        """(key, group) -> page, of what is cached now."""
        self.tokens: dict[PageKey, tuple[PageKey, tuple[int, ...]]] = {}
        """Key -> its parent and tokens, of all that ever was."""
        self.num_evicted = 0

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        assert (key, group) not in self.pages, "cached twice"
        assert self.tokens.setdefault(key, (parent, tuple(token_ids))) == (parent, tuple(token_ids))
        self.pages[key, group] = page

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        assert self.pages.pop((key, group)) == page, "another page was evicted"
        self.num_evicted += 1

    def check(self, cache: PrefixCache) -> None:
        """The events alone say what the trees hold, and one root stands for one namespace."""
        told = {page: self._found(key, group) for (key, group), page in self.pages.items()}
        assert len(told) == len(self.pages), "a page is cached twice"
        held: dict[int, Cached] = {}
        roots = set()
        for namespace, root in cache._roots.items():
            of_root = dict(_pages_below(root))
            held |= of_root
            roots |= {(told[page][0], namespace) for page in of_root}
        assert {page: found for page, (_, found) in told.items()} == held
        assert len(roots) == len({one for one, _ in roots}) == len({one for _, one in roots})

    def _found(self, key: PageKey, group: int) -> tuple[PageKey, Cached]:
        """The key of its root, and what it is."""
        tokens: tuple[int, ...] = ()
        while key in self.tokens:
            key, own = self.tokens[key]
            tokens = own + tokens
        return key, (tokens, group)


def _pages_below(root: Node) -> Iterator[tuple[int, Cached]]:
    stack: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
    while stack:
        node, before = stack.pop()
        tokens = before + node.key
        stack += [(child, tokens) for child in node.children.values()]
        for group, page in enumerate(node.pages):
            if page != NO_PAGE:
                yield page, (tokens, group)
