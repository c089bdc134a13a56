"""A pool of limited processes: how many there are, and what a call says when it gets none."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trtc.protos.errors import UnavailableError
from trtc.runtime.host.limited_pool import LimitedPool, PoolBusy, SetUpRefused
from trtc.runtime.host.limited_process import OutOfTime

LIMITS = {"cpu_seconds": 0.0, "memory_bytes": 256 << 20, "recycle_bytes": 128 << 20}
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
SPOKEN = {"messages": [{"role": "user", "content": "hello"}], "variables": {}}


@contextmanager
def pool_of(source: str, most: int = 1) -> Iterator[LimitedPool]:
    set_up = {
        "source": source,
        "special_tokens": {},
        "max_characters": 1 << 20,
        "limits": LIMITS,
    }
    pool = LimitedPool("trtc.runtime.text.chat_sandbox", ("jinja2", "markupsafe"), set_up, most)
    try:
        yield pool
    finally:
        pool.close()


def test_a_process_is_set_up_once_and_kept() -> None:
    with pool_of("{{ messages[0].content }}", most=2) as pool:
        assert pool.pids == []
        pool.start()
        before = pool.pids
        for _ in range(3):
            assert pool.call(SPOKEN, 10.0)["text"] == "hello"
        assert pool.pids == before
        assert len(before) == 1
    assert pool.pids == []
    with pytest.raises(UnavailableError):
        pool.call(SPOKEN, 10.0)


def test_a_refused_set_up_is_not_tried_again() -> None:
    with pool_of("{% if %}") as pool:
        for _ in range(2):
            with pytest.raises(SetUpRefused, match="Expected an expression"):
                pool.call(SPOKEN, 10.0)
            assert pool.pids == []


def test_one_more_call_than_processes_waits_as_long_as_it_may() -> None:
    with pool_of(ENDLESS) as pool:
        pool.start()

        def render() -> None:
            with pytest.raises(OutOfTime):
                pool.call(SPOKEN, 1.0)

        endless = threading.Thread(target=render)
        endless.start()
        while not pool._num_busy:
            time.sleep(0.001)
        with pytest.raises(PoolBusy):
            pool.call(SPOKEN, 10.0, wait_seconds=0.05)
        endless.join()
        pool.start(wait_seconds=30.0)  # in place of the one that was ended
        assert len(pool.pids) == 1
