"""Keys of cached pages; that events are true is a matter of test_scheduler.py's machine."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from tests.support.cache_book import CacheBook
from trtc.runtime.scheduling.cache_events import CacheEvents, is_root, namespace_name
from trtc.runtime.scheduling.kv_pool import KvPool
from trtc.runtime.scheduling.prefix_cache import Node, PrefixCache

EVENTS = CacheEvents(b"secret", [])
NAMESPACES = st.lists(st.text(max_size=4), max_size=3).map(tuple)


@given(NAMESPACES, NAMESPACES)
def test_namespaces_have_keys_of_their_own(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (EVENTS.key_of_root(one) == EVENTS.key_of_root(other)) == (one == other)


def test_keys_follow_namespace_tokens_and_secret() -> None:
    root = EVENTS.key_of_root(("salt", "", "ours"))
    keys = {
        EVENTS.key_after(root, [1, 2]),
        EVENTS.key_after(root, [2, 1]),
        EVENTS.key_after(EVENTS.key_of_root(("salt", "", "theirs")), [1, 2]),
        EVENTS.key_after(EVENTS.key_after(root, [1, 2]), [1, 2]),
        CacheEvents(b"other", []).key_after(root, [1, 2]),
        hashlib.blake2b(root, digest_size=32).digest(),
        root,
    }
    assert len(keys) == 7
    assert EVENTS.key_after(root, (1, 2)) in keys, "lists and tuples are alike"


@given(NAMESPACES, NAMESPACES, st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_a_key_begins_with_the_name_of_its_namespace(
    one: tuple[str, ...], other: tuple[str, ...], tokens: list[int]
) -> None:
    roots = [EVENTS.key_of_root(one), EVENTS.key_of_root(other)]
    pages = [EVENTS.key_after(EVENTS.key_after(root, tokens), tokens) for root in roots]
    assert all(is_root(root) for root in roots)
    assert not any(is_root(page) for page in pages)
    assert [namespace_name(page) for page in pages] == [namespace_name(root) for root in roots]
    assert (namespace_name(pages[0]) == namespace_name(pages[1])) == (one == other)


def test_a_listener_hears_of_pages_in_order() -> None:
    book = CacheBook()
    cache = PrefixCache(KvPool(4, 2), events=CacheEvents(b"secret", [book]))
    pages = cache.allocate(3)
    node: Node = cache.root(("ours",))
    for index, tokens in enumerate(([1, 2], [3, 4], [5, 6])):
        node = cache.insert(node, tokens, [pages[index]])
    first, second, third = [key for key, _ in book.pages]
    assert [book.tokens[key][0] for key in (second, third)] == [first, second]
    cache.release(pages)
    cache.release(cache.allocate(3))
    assert list(book.pages) == [(first, 0)], "leaves went first"
    book.check(cache)
    cache.clear()
    assert book.pages == {}
