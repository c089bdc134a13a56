import random

import pytest

from trtc.protos.errors import InvariantError
from trtc.runtime.kv_pool import KvPool
from trtc.runtime.prefix_cache import PrefixCache

SIZE = 2


def store(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Compute all pages of a sequence and cache them; the pages, still held."""
    matched = cache.match(tokens)
    pages = cache.claim(matched)
    pages += cache.allocate(len(tokens) // SIZE - len(pages))
    node = matched[-1] if matched else cache.root
    for index in range(len(matched), len(pages)):
        node = cache.insert(node, tokens[index * SIZE : (index + 1) * SIZE], pages[index])
        pages[index] = node.page
    return pages


def matched_pages(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return [node.page for node in cache.match(tokens)]


def test_matches_are_whole_pages_of_the_longest_prefix() -> None:
    cache = PrefixCache(KvPool(8, SIZE))
    pages = store(cache, [1, 2, 3, 4, 5, 6])
    assert matched_pages(cache, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert matched_pages(cache, [1, 2, 3, 4, 5]) == pages[:2]
    assert matched_pages(cache, [1, 2, 9, 9]) == pages[:1]
    assert matched_pages(cache, [9, 9, 3, 4]) == []
    assert matched_pages(cache, [1]) == []


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache(KvPool(5, SIZE))
    trunk, left = [1, 1], [1, 1, 2, 2]
    right = [1, 1, 3, 3]
    left_pages, right_pages = store(cache, left), store(cache, right)
    assert left_pages[0] == right_pages[0]
    cache.release(left_pages)
    cache.release(right_pages)
    cache.release(store(cache, left))  # used again: now `right` is older
    cache.check_integrity([])
    cache.pool.allocate(2)
    (evicted,) = cache.allocate(1)
    assert evicted == right_pages[1]
    assert matched_pages(cache, left) == left_pages
    cache.release(cache.allocate(2))
    assert matched_pages(cache, trunk) == []


def test_held_pages_are_not_evicted() -> None:
    cache = PrefixCache(KvPool(3, SIZE))
    held = store(cache, [1, 1, 2, 2])
    cache.release(store(cache, [3, 3]))
    assert cache.num_available == 1
    cache.allocate(1)
    assert matched_pages(cache, [1, 1, 2, 2]) == held
    with pytest.raises(AssertionError):
        cache.allocate(1)


def test_the_second_of_two_equal_pages_is_given_back() -> None:
    cache = PrefixCache(KvPool(4, SIZE))
    first, second = cache.allocate(1), cache.allocate(1)
    node = cache.insert(cache.root, [7, 7], first[0])
    assert cache.insert(cache.root, [7, 7], second[0]) is node
    assert cache.pool.refs[second[0]] == 0
    assert cache.num_holders(first[0]) == 2
    cache.check_integrity([first, first])


def test_clear_leaves_what_is_held() -> None:
    cache = PrefixCache(KvPool(6, SIZE))
    held = store(cache, [1, 1, 2, 2])
    cache.release(store(cache, [1, 1, 3, 3]))
    cache.clear()
    assert cache.num_idle == 0
    assert matched_pages(cache, [1, 1, 2, 2]) == held
    assert matched_pages(cache, [1, 1, 3, 3]) == held[:1]
    cache.check_integrity([held])


def test_integrity_finds_a_broken_tree() -> None:
    cache = PrefixCache(KvPool(4, SIZE))
    pages = store(cache, [1, 1, 2, 2])
    with pytest.raises(InvariantError, match="held without its parent"):
        cache.pool.release(pages[0])
        cache._idle[pages[0]] = cache.root.children[1, 1]
        cache.check_integrity([pages[1:]])


def test_random_use_keeps_the_tree_and_the_pool_in_step() -> None:
    rng = random.Random(1)
    cache = PrefixCache(KvPool(16, SIZE))
    held: list[list[int]] = []
    for _ in range(3_000):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 6))]
        if len(tokens) // SIZE <= cache.num_available - len(cache.match(tokens)):
            held.append(store(cache, tokens))
        if held and (rng.random() < 0.6 or cache.num_available < 8):
            cache.release(held.pop(rng.randrange(len(held))))
        cache.check_integrity(held)
    assert cache.pool.num_free < 16
