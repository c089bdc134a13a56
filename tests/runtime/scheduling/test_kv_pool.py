import random

import pytest

from trtc.protos.errors import InvariantError
from trtc.runtime.scheduling.kv_pool import KvPool


def test_pages_are_shared_and_released_one_by_one() -> None:
    pool = KvPool(4, 16)
    first, second = pool.allocate(2)
    pool.share([first])
    assert pool.release(first) == 1
    assert pool.num_free == 2
    assert pool.release(first) == 0
    assert pool.num_free == 3
    pool.check_integrity([[second]])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert KvPool(4, 16).pages_for(tokens) == pages


def test_misuse_is_caught_at_once() -> None:
    pool = KvPool(2, 16)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError):
        pool.release(0)
    with pytest.raises(AssertionError):
        pool.share([1])


def test_integrity_finds_leaks_and_double_frees() -> None:
    pool = KvPool(3, 16)
    (page,) = pool.allocate(1)
    with pytest.raises(InvariantError, match="1 references, 0 accounted for"):
        pool.check_integrity([])
    with pytest.raises(InvariantError, match="1 references, 2 accounted for"):
        pool.check_integrity([[page], [page]])
    pool.refs[page] = 0  # forgotten without being freed
    with pytest.raises(InvariantError, match="free 0 times"):
        pool.check_integrity([])


def test_references_are_conserved_over_random_use() -> None:
    rng = random.Random(0)
    pool = KvPool(12, 4)
    holders: list[list[int]] = []
    for _ in range(5_000):
        if rng.random() < 0.5 and pool.num_free:
            holders.append(pool.allocate(rng.randint(1, pool.num_free)))
        elif holders and rng.random() < 0.3:
            shared = rng.sample(rng.choice(holders), 1)
            pool.share(shared)
            holders.append(list(shared))
        elif holders:
            for page in holders.pop(rng.randrange(len(holders))):
                pool.release(page)
        pool.check_integrity(holders)
