"""Calls from one asyncio loop into another."""

import asyncio
import threading
from typing import Any

import pytest

from tests.support.aio import asynchronous
from trtc.runtime.host.loop_thread import LoopThread
from trtc.runtime.host.relay import Relay


@asynchronous
async def test_calls_are_made_in_order_in_the_other_loop_with_one_wake_up_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = LoopThread("trtc-test")
    wakes: list[int] = []
    wake = thread.loop.call_soon_threadsafe

    def counted(*arguments: Any, **options: Any) -> asyncio.Handle:
        wakes.append(1)
        return wake(*arguments, **options)

    monkeypatch.setattr(thread.loop, "call_soon_threadsafe", counted)
    relay = Relay(asyncio.get_running_loop(), thread.loop)
    made: list[tuple[int, int]] = []
    ended = threading.Event()
    for turn in range(3):
        for number in range(100):
            relay.post(lambda at: made.append((at, threading.get_ident())), 100 * turn + number)
        assert len(wakes) == turn
        await asyncio.sleep(0)
        assert len(wakes) == turn + 1
    relay.post(ended.set)
    relay.flush()
    assert await asyncio.to_thread(ended.wait, 30)
    assert [at for at, _ in made] == list(range(300))
    assert {one for _, one in made} == {thread._thread.ident}
    monkeypatch.undo()
    await thread.stop()
