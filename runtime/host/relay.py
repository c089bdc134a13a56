"""Calls from one asyncio loop into another, which runs in another thread."""

import asyncio
from collections.abc import Callable
from typing import Any

_Post = tuple[Callable[..., object], tuple[Any, ...]]


class Relay:
    """Makes calls in another loop, with one wake-up per iteration of the sender's loop.

    A wake-up for each would let both threads take the GIL from each other for every call.
    """

    def __init__(
        self, sender: asyncio.AbstractEventLoop, receiver: asyncio.AbstractEventLoop
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._posts: list[_Post] = []

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call it in the receiver's loop, after all that were posted before. Used in the sender's
        loop."""
        if not self._posts:
            self._sender.call_soon(self.flush)
        self._posts.append((call, arguments))

    def flush(self) -> None:
        """Hand over what has been posted now, not at the end of the iteration."""
        if self._posts:
            posts, self._posts = self._posts, []
            self._receiver.call_soon_threadsafe(_make, posts)


def _make(posts: list[_Post]) -> None:
    for call, arguments in posts:
        call(*arguments)
