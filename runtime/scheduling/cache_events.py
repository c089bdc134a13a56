"""Events of the prefix cache: which pages were cached, and which were evicted.

A page's key is the name of its namespace and the last link of a chain of keyed hashes over that and
all tokens up to its own last one. So equal keys mean equal keys and values of one namespace, a key
tells nothing of salt or tokens, and nobody without the secret can make one.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from trtc.runtime.requests.principal import Namespace

PageKey = bytes
"""Of one page of tokens; the pages of all groups that hold these tokens have the same."""

_NAME_BYTES = 16
_LINK_BYTES = 32


def namespace_name(key: PageKey) -> bytes:
    """Of a page's or a root's: the same for all keys of a namespace."""
    return key[:_NAME_BYTES]


def is_root(key: PageKey) -> bool:
    """Whether it is what the keys of first pages follow."""
    return len(key) == _NAME_BYTES


class CacheListener(Protocol):
    """Called for every event, in order, in the scheduler's thread. It must not change the cache."""

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        """A group's page of these tokens can be found from now on.

        Args:
            parent: of the page of tokens before it; of the first one, a key of the namespace.
        """
        ...

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        """The page was evicted. It keeps its bytes until the next launch."""
        ...


class CacheEvents:
    """Makes the keys and calls all listeners."""

    def __init__(self, secret: bytes, listeners: Sequence[CacheListener]) -> None:
        """
        Args:
            secret: up to 64 bytes; whoever has it can tell whether a guess of tokens is cached.
        """
        self._secret = secret
        self._listeners = tuple(listeners)

    def key_of_root(self, namespace: Namespace) -> PageKey:
        """What the first page's key follows."""
        parts = [part.encode("utf-8", "surrogatepass") for part in namespace]
        sized = b"".join(b"%d:%b" % (len(part), part) for part in parts)
        return self._hash(b"namespace", sized, _NAME_BYTES)

    def key_after(self, parent: PageKey, token_ids: Sequence[int]) -> PageKey:
        """Of the page with these tokens, behind the page of `parent`."""
        link = self._hash(b"tokens", parent + array("q", token_ids).tobytes(), _LINK_BYTES)
        return namespace_name(parent) + link

    def cached(
        self, key: PageKey, parent: PageKey, token_ids: Sequence[int], group: int, page: int
    ) -> None:
        for listener in self._listeners:
            listener.cached(key, parent, token_ids, group, page)

    def evicted(self, key: PageKey, group: int, page: int) -> None:
        for listener in self._listeners:
            listener.evicted(key, group, page)

    def _hash(self, kind: bytes, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._secret, person=kind).digest()
