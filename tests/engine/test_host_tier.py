"""Compiled models whose cached pages leave for the host's memory and come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.conftest import Engines
from tests.support.engines import open_executor
from tests.support.loops import Inbox, Loop
from tests.support.models import random_prompt
from tests.support.requests import greedy_request
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.requests.request import TokenLogprobs

PROMPTS = [random_prompt(56, seed=seed) for seed in range(3)]


@contextmanager
def running(engine: Path, num_pages: int, config: LoopConfig) -> Iterator[Loop]:
    executor = open_executor(engine, num_pages=num_pages)
    loop = Loop(executor, None, config)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
        executor.close()
    loop.check_integrity()


def ask(loop: Loop, attempt: str, number: int) -> Inbox:
    name = f"{attempt}{number}"
    return loop.send(greedy_request(name, PROMPTS[number], 12, ignore_eos=True, logprobs=3))


def told(inbox: Inbox) -> list[TokenLogprobs]:
    return list(inbox.result().completions[0].logprobs)


@pytest.mark.parametrize(
    ("family", "kv_dtype", "num_pages"),
    [
        pytest.param("gemma3", None, 34, id="windows"),
        pytest.param("gemma3", "int4", 34, id="windows-int4"),
        pytest.param("lfm2", None, 16, id="states"),
        pytest.param("qwen3_5", None, 16, id="delta"),
    ],
)
def test_pages_that_come_back_change_no_bit(
    tiny_engines: Engines, family: str, kv_dtype: str | None, num_pages: int
) -> None:
    """Each prompt again after the others have taken its pages: alone, and beside the others."""
    _, engine = tiny_engines(family, kv_dtype)
    with running(engine, 64, LoopConfig(prefix_cache=False)) as loop:
        expected = [told(ask(loop, "", number)) for number in range(3)]
    for num_bytes in (0, 1 << 20):
        with running(engine, num_pages, LoopConfig(kv_host_bytes=num_bytes)) as loop:
            for attempt in ("first", "again"):
                assert [told(ask(loop, attempt, number)) for number in range(3)] == expected
            together = [ask(loop, "together", number) for number in range(3)]
            assert [told(one) for one in together] == expected
            assert (loop.stats().host_hit_tokens > 100) == bool(num_bytes)
