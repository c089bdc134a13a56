"""Reference counts of the KV pool's pages. Their bytes belong to the executor."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trtc.protos.errors import InvariantError
from trtc.protos.kv import held_pages


class PageCopy(NamedTuple):
    """A copy-on-write to perform before the next step writes. Copies are done in order."""

    source: int
    target: int


RELEASED_PAGE = 0
"""Entry of a page table for a page that the sequence has released; no kernel reads it."""


_CHECKED_AT_ONCE = 256
"""Pages that one part of an integrity check covers."""


class KvPool:
    """Reference counts of pages. A page without references is free."""

    def __init__(
        self, num_pages: int, page_size: int, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        """For `windows` see CacheLayout."""
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows = windows
        self.refs = [0] * num_pages
        """[num_pages] references to each page; read-only for callers."""
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def state_group(self) -> int | None:
        """Index of the group whose pages are states; None: there is none."""
        return self.windows.index(0) if 0 in self.windows else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def most_pages(self, num_tokens: int) -> int:
        """Pages of all groups that a sequence of `num_tokens` tokens holds while it decodes."""
        return sum(held_pages(num_tokens, self.page_size, window) for window in self.windows)

    def num_outside(self, window: int | None, num_tokens: int) -> int:
        """Leading pages that a sequence of `num_tokens` tokens may release, because no later token
        reads them. The last page before the window is kept: with short windows, it keeps the
        sequence's node in the prefix tree alive.

        In a state group, all pages before the last full one may be released.
        """
        if window is None:
            return 0
        return max(0, (num_tokens - window) // self.page_size - 1)

    def allocate(self, number: int) -> list[int]:
        """Take free pages, each with one reference."""
        assert number <= len(self._free), (number, len(self._free))
        pages = [self._free.pop() for _ in range(number)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, none of which may be free."""
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is free"
            self.refs[page] += 1

    def release(self, page: int) -> int:
        """Drop a reference; returns how many are left."""
        left = self.refs[page] - 1
        assert left >= 0, f"page {page} is free"
        self.refs[page] = left
        if left == 0:
            self._free.append(page)
        return left

    def check_integrity(self, holdings: Iterable[Iterable[int]]) -> None:
        """Check that every reference is one of `holdings`, and every other page is free once.

        Raises:
            InvariantError: a page leaked, or was allocated twice.
        """
        for _ in self.integrity_checks(holdings):
            pass

    def integrity_checks(self, holdings: Iterable[Iterable[int]]) -> Iterator[None]:
        """The same in parts of well under a millisecond each."""
        held: Counter[int] = Counter()
        for pages in holdings:
            held.update(pages)
            yield
        free = Counter(self._free)
        for page, refs in enumerate(self.refs):
            if refs != held[page]:
                raise InvariantError(
                    f"page {page} has {refs} references, {held[page]} accounted for"
                )
            if free[page] != (refs == 0):
                raise InvariantError(
                    f"page {page} has {refs} references and is free {free[page]} times"
                )
            if page % _CHECKED_AT_ONCE == 0:
                yield
