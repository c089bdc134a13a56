"""Limits how many requests are read and parsed at once.

    turn -> read -> parse, convert (a thread) -> admitted
    └────── a large request holds its turn ──────┘

A request is not read before its turn: flow control keeps its bytes at the client. So memory is
bounded by turns times the largest request, over all ports. No client has all turns, and waiting
clients are served round-robin.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from trtc.protos.errors import CancelledError
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.fair_turns import FairTurns
from trtc.runtime.service.limits import ServiceLimits

READ_S = 20.0
"""Seconds for a whole request to arrive, from its turn on."""
TURN_S = 60.0
SMALL_BYTES = 1 << 14
"""Requests up to this size are parsed in the event loop, and hold their turn only while they are
read."""
_NAME = "the server's places for requests that come in"

RequestT = TypeVar("RequestT")


class Intake:
    """Reads and parses requests; close it to end its thread."""

    def __init__(self, limits: ServiceLimits) -> None:
        turns = max(4, limits.max_bytes_in_flight // limits.max_request_bytes)
        # A host may have three quarters of the turns, and each of its connections one quarter.
        self._hosts = FairTurns(turns, max(1, turns * 3 // 4), TURN_S, _NAME)
        self._clients = FairTurns(limits.max_streams, max(1, turns // 4), TURN_S, _NAME)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trtc-parse")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @asynccontextmanager
    async def request(
        self,
        principal: Principal,
        read: Callable[[], Awaitable[bytes]],
        parse: Callable[[bytes], RequestT],
    ) -> AsyncIterator[RequestT]:
        """Read a request and parse it. Leave the context as soon as the request is admitted: until
        then a large one holds its turn.

        Raises:
            QueueFullError: there was no turn in time.
            CancelledError: the request did not arrive in time. Also raises the errors of `read` and
                `parse`.
        """
        async with AsyncExitStack() as turns:
            await turns.enter_async_context(self._clients.turn(principal.name))
            await turns.enter_async_context(self._hosts.turn(principal.group))
            data = await _in_time(read())
            if len(data) > SMALL_BYTES:
                loop = asyncio.get_running_loop()
                yield await loop.run_in_executor(self._pool, parse, data)
                return
        yield parse(data)


async def _in_time(reading: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await reading
    except TimeoutError as error:
        raise CancelledError(
            f"the request did not come whole within {READ_S:g} s", remedy="Send it at once"
        ) from error
