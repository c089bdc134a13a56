"""A semaphore that is shared fairly among clients.

No client can hold all turns, so that another client finds one free; waiting clients are served
round-robin.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trtc.protos.errors import QueueFullError


class FairTurns:
    """Turns at a resource. For one asyncio loop.

    Args:
        capacity: most concurrent turns.
        per_client: most concurrent turns of one client.
        wait_s: seconds to wait for a turn.
        name: the resource, for the error after `wait_s`.
    """

    def __init__(self, capacity: int, per_client: int, wait_s: float, name: str) -> None:
        self._capacity = capacity
        self._per_client = per_client
        self._wait_s = wait_s
        self._name = name
        self._running: Counter[str] = Counter()
        self._num_running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Client -> its waiting calls; the client with the next turn is first. No empty queues."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Hold a turn.

        Raises:
            QueueFullError: there was no turn in time.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        self._grant()
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
            yield
        except TimeoutError as error:
            if granted.done() and not granted.cancelled():
                raise
            raise QueueFullError(
                f"{self._name} were busy for {self._wait_s:g} seconds", remedy="Try again later"
            ) from error
        finally:
            self._leave(client, granted)

    def _leave(self, client: str, granted: "asyncio.Future[None]") -> None:
        if granted.done() and not granted.cancelled():
            self._num_running -= 1
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
        elif granted in (queue := self._waiting.get(client, deque())):
            queue.remove(granted)
            if not queue:
                del self._waiting[client]
        self._grant()

    def _grant(self) -> None:
        for client in tuple(self._waiting):
            if self._num_running >= self._capacity:
                return
            if self._running[client] >= self._per_client:
                continue
            queue = self._waiting.pop(client)
            first = queue.popleft()
            if not first.cancelled():
                first.set_result(None)
                self._num_running += 1
                self._running[client] += 1
            if queue:
                self._waiting[client] = queue  # after the other clients
