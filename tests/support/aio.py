"""Async tests without a plugin: each runs in a fresh loop and must leave nothing running."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run the test in an event loop; tasks or trtc's threads left behind fail it."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(_checked(test(*args, **kwargs)))
        assert_no_threads()

    return wrapper


async def _checked(test: Coroutine[Any, Any, None]) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    await test
    # gRPC's own tasks end a moment after its server and channels.
    await _until(lambda: not _others(), seconds=5)
    assert not _others(), f"tasks left: {_others()}"
    assert not failures, failures


def assert_no_threads(seconds: float = 5.0) -> None:
    """None of the threads that trtc names may outlive its server."""
    deadline = time.monotonic() + seconds
    while left := [one.name for one in threading.enumerate() if one.name.startswith("trtc")]:
        assert time.monotonic() < deadline, f"threads left: {left}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait for something that another thread or process brings about."""
    await _until(condition, seconds)
    assert condition(), f"not within {seconds:g} s: {what}"


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


def _others() -> list[str]:
    current = asyncio.current_task()
    return [repr(task) for task in asyncio.all_tasks() if task is not current]
