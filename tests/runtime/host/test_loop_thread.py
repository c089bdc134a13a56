"""An asyncio loop in a thread of its own."""

import asyncio
import threading

import pytest

from tests.support.aio import asynchronous
from trtc.runtime.host.loop_thread import LoopThread


@asynchronous
async def test_a_coroutine_runs_in_the_thread_and_gives_what_it_returns_or_raises() -> None:
    async def name() -> str:
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is thread.loop
        return threading.current_thread().name

    async def fail() -> None:
        raise LookupError("of the thread")

    thread = LoopThread("trtc-test")
    assert await thread.run(name()) == "trtc-test"
    with pytest.raises(LookupError, match="of the thread"):
        await thread.run(fail())
    await thread.stop()


@asynchronous
async def test_stopping_cancels_what_runs_and_leaves_no_thread() -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def start() -> "asyncio.Task[None]":
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    thread = LoopThread("trtc-test-stopped")
    task = await thread.run(start())
    await thread.stop()
    assert cancelled.is_set()
    assert task.cancelled()
    assert thread.loop.is_closed()
    assert "trtc-test-stopped" not in [one.name for one in threading.enumerate()]
