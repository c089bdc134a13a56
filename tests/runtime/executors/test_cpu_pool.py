"""The CPU engines' KV pool: memory comes ahead of its use, and nothing else changes by that."""

import ctypes
import mmap
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.caches import uniform_layout
from tests.support.smaps import THP, kilobytes, mapping_entry
from trtc.protos.kv import CacheLayout
from trtc.runtime.executors import cpu_pool
from trtc.runtime.executors.cpu_pool import KvPool

MIB = 1 << 20
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
WIDE = uniform_layout(num_layers=3, num_kv_heads=8, head_dim=128, page_size=16, dtype="bf16")
"""64 KiB a page and layer: 32 pages a huge page."""
TINY = uniform_layout(num_layers=2, num_kv_heads=1, head_dim=24, page_size=4, dtype="bf16")
"""Pages of 384 bytes, which no page of memory begins with."""


@contextmanager
def open_pool(kv: CacheLayout, num_pages: int) -> Iterator[KvPool]:
    pool = KvPool(kv, num_pages, ahead_bytes=3 * 4 * MIB)
    try:
        yield pool
    finally:
        pool.close()


def resident(pool: KvPool, layer: int) -> int:
    """Bytes of a layer that memory backs."""
    begin = int(pool.pointers[layer]) & -mmap.PAGESIZE
    size = int(pool.pointers[1] - pool.pointers[0])
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages)
    return sum(byte & 1 for byte in pages) * mmap.PAGESIZE


def until(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.005)
    return done()


def test_memory_comes_some_way_ahead_of_its_use_in_every_layer() -> None:
    with open_pool(WIDE, 1024) as pool:
        assert not resident(pool, 0)
        pool.touch_ahead(0)
        assert until(lambda: resident(pool, 2) >= 4 * MIB)
        pool.touch_ahead(100)
        assert until(lambda: resident(pool, 2) >= 12 * MIB)
        time.sleep(0.05)
        # Whole huge pages, where a layer does not begin with one.
        assert all(resident(pool, layer) <= 16 * MIB for layer in range(3))


def test_a_pool_is_touched_to_its_end_and_no_byte_changes() -> None:
    with open_pool(TINY, 1000) as pool:
        size = 2 * 1000 * 384
        data = (ctypes.c_ubyte * size).from_address(int(pool.pointers[0]))
        written = np.ctypeslib.as_array(data)
        written[:] = np.arange(size, dtype=np.uint32) % 251
        pool.touch_ahead(999)
        assert until(lambda: resident(pool, 1) >= 1000 * 384)
        np.testing.assert_array_equal(written, np.arange(size, dtype=np.uint32) % 251)
        del written, data


def huge_bytes(pool: KvPool) -> int:
    """Bytes of the pool's mapping that are in huge pages."""
    return kilobytes(mapping_entry(int(pool.pointers[0])), "AnonHugePages") << 10


@pytest.mark.skipif(
    not THP.exists() or "[madvise]" not in THP.read_text(), reason=f"{THP} is not madvise"
)
@pytest.mark.skipif(KERNEL < (6, 1), reason="Linux before 6.1 makes no huge pages at once")
def test_a_first_step_gets_small_pages_which_become_huge_later() -> None:
    num_used = 50
    size = num_used * WIDE.region_bytes[0]
    pattern = np.arange(size, dtype=np.uint32) % 251
    with open_pool(WIDE, 1024) as pool:
        used = [
            np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(int(layer)))
            for layer in pool.pointers
        ]
        for pages in used:
            pages[:] = pattern
        assert huge_bytes(pool) == 0 and resident(pool, 0) == size
        pool.touch_ahead(num_used)
        assert until(lambda: huge_bytes(pool) >= 3 * (size + 4 * MIB))
        for pages in used:
            np.testing.assert_array_equal(pages, pattern)
        del pages, used


def test_a_pool_that_closes_is_touched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def slow(address: int, size: int, advice: int) -> int:
        asked.append(size)
        time.sleep(0.02)
        return 0

    monkeypatch.setattr(cpu_pool, "_madvise", lambda: slow)
    with open_pool(WIDE, 4096) as pool:
        pool.touch_ahead(4096)
        assert until(lambda: bool(asked))
    found = len(asked)
    time.sleep(0.1)
    assert len(asked) == found < 3 * 4096 // 32


def test_a_system_without_the_advice_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(address: int, size: int, advice: int) -> int:
        asked.append(advice)
        return -1

    monkeypatch.setattr(cpu_pool, "_madvise", lambda: refuse)
    with open_pool(WIDE, 4096) as pool:
        pool.touch_ahead(1)
        assert until(lambda: bool(asked))
        pool.touch_ahead(4000)
        time.sleep(0.05)
        assert asked == [cpu_pool._MADV_POPULATE_WRITE]
        pool.copy_pages([0], [1])
