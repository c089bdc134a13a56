import random
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtc.protos.errors import InvariantError
from trtc.runtime.requests.principal import Namespace
from trtc.runtime.scheduling.kv_pool import KvPool
from trtc.runtime.scheduling.prefix_cache import Node, PrefixCache

SIZE = 2
OURS, THEIRS = ("ours",), ("theirs",)


def store(cache: PrefixCache, tokens: list[int], namespace: Namespace = OURS) -> list[int]:
    """Compute all pages of a sequence and cache them; the pages, still held."""
    matched = cache.match(tokens, namespace)
    (pages,) = cache.claim(matched)
    pages += cache.allocate(len(tokens) // SIZE - len(pages))
    node = matched[-1] if matched else cache.root(namespace)
    for index in range(len(matched), len(pages)):
        node = cache.insert(node, tokens[index * SIZE : (index + 1) * SIZE], [pages[index]])
        (pages[index],) = node.pages
    return pages


def matched_pages(cache: PrefixCache, tokens: list[int], namespace: Namespace = OURS) -> list[int]:
    return [node.pages[0] for node in cache.match(tokens, namespace)]


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
    node = cache.insert(cache.root(OURS), [7, 7], first)
    assert cache.insert(cache.root(OURS), [7, 7], second) is node
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
        cache._idle[pages[0]] = cache.root(OURS).children[1, 1]
        cache.check_integrity([pages[1:]])


def test_random_use_keeps_the_tree_and_the_pool_in_step() -> None:
    rng = random.Random(1)
    cache = PrefixCache(KvPool(16, SIZE))
    held: list[list[int]] = []
    for _ in range(3_000):
        tokens = [rng.randrange(2) for _ in range(2 * rng.randint(1, 6))]
        if len(tokens) // SIZE <= cache.num_available - len(cache.match(tokens, OURS)):
            held.append(store(cache, tokens))
        if held and (rng.random() < 0.6 or cache.num_available < 8):
            cache.release(held.pop(rng.randrange(len(held))))
        cache.check_integrity(held)
    assert cache.pool.num_free < 16


def test_a_namespace_finds_only_what_it_left() -> None:
    cache = PrefixCache(KvPool(8, SIZE))
    cache.release(store(cache, [1, 2, 3, 4], OURS))
    assert matched_pages(cache, [1, 2, 3, 4], THEIRS) == []
    cache.release(store(cache, [1, 2, 3, 4], THEIRS))
    ours, theirs = (matched_pages(cache, [1, 2, 3, 4], one) for one in (OURS, THEIRS))
    assert len({*ours, *theirs}) == 4
    cache.check_integrity([])


def test_a_root_that_was_dropped_while_it_was_held_comes_back() -> None:
    cache = PrefixCache(KvPool(8, SIZE))
    first, second = cache.root(OURS), cache.root(OURS)
    pages = cache.allocate(2)
    cache.insert(first, [1, 1], [pages[0]])
    cache.release([pages[0]])
    cache.clear()
    node = cache.insert(second, [1, 1], [pages[1]])
    assert cache.insert(first, [1, 1], cache.allocate(1)) is node
    cache.check_integrity([[pages[1], pages[1]]])


def test_namespaces_without_pages_cost_nothing() -> None:
    cache = PrefixCache(KvPool(4, SIZE))
    cache.release(store(cache, [1, 1], ("connection", "0")))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(20_000):
        cache.release(store(cache, [1, 1], ("connection", str(number))))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
    cache.check_integrity([])


@given(
    gaps=st.sets(st.tuples(st.integers(0, 9), st.integers(1, 2)), max_size=12),
    windows=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
@example(gaps={(6, 2), (3, 1)}, windows=(5, 11))
def test_a_match_has_the_last_pages_of_every_window(
    gaps: set[tuple[int, int]], windows: tuple[int, int]
) -> None:
    """Where one window's gap shortens it, another window looks back to other pages."""
    cache = PrefixCache(KvPool(40, SIZE, (None, *windows)))
    tokens = list(range(10 * SIZE))
    node: Node = cache.root(OURS)
    for index in range(10):
        pages = cache.allocate(3)
        node = cache.insert(node, tokens[index * SIZE : (index + 1) * SIZE], pages)
        for _, group in gaps & {(index, 1), (index, 2)}:
            cache.release(pages[group : group + 1])
            cache._idle = {pages[group]: cache._idle[pages[group]]}
            cache._evict_one()
    # One token more: a window of 0 is a state, which never serves a whole prompt.
    matched = cache.match([*tokens, 0], OURS)

    def serves(length: int) -> bool:
        return not any(
            (index, group) in gaps
            for group, window in enumerate(windows, 1)
            for index in range(cache.pool.num_outside(window, length * SIZE), length)
        )

    assert len(matched) == max(length for length in range(11) if serves(length))


class NamespaceMachine(RuleBasedStateMachine):
    """Any use by three clients of few tokens, so that their prompts are often the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(KvPool(12, SIZE))
        self.held: list[list[int]] = []
        self.owner: dict[int, Namespace] = {}
        """page -> the namespace that computed it last."""

    @rule(
        namespace=st.sampled_from([("a",), ("b",), ("c", "salt")]),
        tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=8),
    )
    def compute(self, namespace: Namespace, tokens: list[int]) -> None:
        matched = self.cache.match(tokens, namespace)
        assert all(self.owner[node.pages[0]] == namespace for node in matched)
        revived = sum(self.cache.is_idle(node.pages[0]) for node in matched)
        if len(tokens) // SIZE - len(matched) + revived > self.cache.num_available:
            return
        pages = store(self.cache, tokens, namespace)
        for page in pages[len(matched) :]:
            self.owner[page] = namespace
        assert all(self.owner[page] == namespace for page in pages)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_first(self, data: st.DataObject) -> None:
        self.cache.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def evict(self) -> None:
        self.cache.clear()

    @invariant()
    def pages_are_conserved(self) -> None:
        self.cache.check_integrity(self.held)

    def teardown(self) -> None:
        for pages in self.held:
            self.cache.release(pages)
        self.cache.clear()
        self.cache.check_integrity([])
        assert self.cache.pool.num_free == self.cache.pool.num_pages


TestNamespaceMachine = NamespaceMachine.TestCase
TestNamespaceMachine.settings = settings(
    max_examples=60, stateful_step_count=60, derandomize=True, deadline=None
)
