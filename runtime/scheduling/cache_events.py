"""Events of the prefix cache: which pages were cached, and which were evicted.

A page's key is the name of its namespace and the last link of a chain of keyed hashes, over the
namespace and all tokens up to the end of the page. So pages with equal keys hold equal KV of one
namespace, a key reveals neither salt nor tokens, and only holders of the secret can compute one.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from trtc.runtime.requests.principal import Namespace

PageKey = bytes
"""Key of one page of tokens; the pages of all groups that hold these tokens share it."""

_NAME_BYTES = 16
_LINK_BYTES = 32


def namespace_name(key: PageKey) -> bytes:
    """Name of the namespace of a page's or a root's key."""
    return key[:_NAME_BYTES]


def is_root(key: PageKey) -> bool:
    """Whether it is a root's key: the parent of the first pages of a namespace."""
    return len(key) == _NAME_BYTES


class CacheListener(Protocol):
    """Called for every event, in order, in the scheduler's thread. It must not change the cache."""

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        """A group's page of these tokens can be found from now on.

        Args:
            parent: key of the page of tokens before it; for the first page, the root's key.
        """
        ...

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        """The page was evicted. It keeps its bytes until the next launch."""
        ...


class CacheEvents:
    """Computes keys and calls all listeners."""

    def __init__(self, secret: bytes, listeners: Sequence[CacheListener]) -> None:
        """
        Args:
            secret: up to 64 bytes; whoever has it can test whether guessed tokens are cached.
        """
        self._secret = secret
        # Copied for every page, so that the keyed initial state is computed once.
        self._links = hashlib.blake2b(digest_size=_LINK_BYTES, key=secret, person=b"tokens")
        self._listeners = tuple(listeners)

    def key_of_root(self, namespace: Namespace) -> PageKey:
        """Key of a namespace's root: the parent of its first pages."""
        parts = [part.encode("utf-8", "surrogatepass") for part in namespace]
        sized = b"".join(b"%d:%b" % (len(part), part) for part in parts)
        return hashlib.blake2b(
            sized, digest_size=_NAME_BYTES, key=self._secret, person=b"namespace"
        ).digest()

    def key_after(self, parent: PageKey, token_ids: Sequence[int]) -> PageKey:
        """Key of the page with these tokens, which follows the page of `parent`."""
        link = self._links.copy()
        link.update(parent + array("q", token_ids).tobytes())
        return namespace_name(parent) + link.digest()

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        for listener in self._listeners:
            listener.cached(key, parent, token_ids, group, page)

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        for listener in self._listeners:
            listener.evicted(key, group, page)
