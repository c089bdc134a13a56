"""Requests on their way in: how many are read at once, how many bytes they hold, how long it takes.

    connection -> turn -> read -> count, parse, convert (a thread) -> admitted
                  └────── what a large request holds ───────────┘

A call whose turn has not come is not read: flow control keeps its bytes at its client. So memory is
bounded by turns times the largest request, whoever sends. Nobody has all turns, and who waits takes
turns with the others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import grpc.aio

from trtc.protos.errors import CancelledError, InvalidRequestError
from trtc.runtime.frontends.grpc.resets import Resets
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.fair_turns import FairTurns
from trtc.runtime.service.limits import ServiceLimits

READ_S = 20.0
"""For a whole request to come, from its turn on."""
TURN_S = 60.0
SMALL_BYTES = 1 << 14
"""Requests up to this size are parsed at once, and hold their turn only while they are read."""
_NAME = "the server's places for requests that come in"

RequestT = TypeVar("RequestT")


class Intake:
    """Reads and parses requests; close it to end its thread."""

    def __init__(self, limits: ServiceLimits) -> None:
        turns = max(4, limits.max_bytes_in_flight // limits.max_request_bytes)
        # A host may have three quarters of the turns, a connection of it one quarter.
        self._hosts = FairTurns(turns, max(1, turns * 3 // 4), TURN_S, _NAME)
        self._clients = FairTurns(limits.max_streams, max(1, turns // 4), TURN_S, _NAME)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trtc-parse")
        self._resets = Resets()

    def drain(self) -> None:
        """Calls that were cancelled end at once from now on."""
        self._resets.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @asynccontextmanager
    async def request(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        principal: Principal,
        parse: Callable[[bytes], RequestT],
    ) -> AsyncIterator[RequestT]:
        """The call's one request, as `parse` makes it from its bytes. Leave the context as soon as
        the request is admitted: until then a large one holds its turn.

        Raises:
            InvalidRequestError: there is none; and what `parse` raises.
            CancelledError: it did not come in time.
            QueueFullError: no turn came in time.
        """
        async with AsyncExitStack() as turns:
            try:
                await turns.enter_async_context(self._clients.turn(principal.name))
                await turns.enter_async_context(self._hosts.turn(principal.group))
                data = await _read(context)
            except asyncio.CancelledError:
                await turns.aclose()
                await self._resets.hold(principal.group)
                raise
            if len(data) > SMALL_BYTES:
                loop = asyncio.get_running_loop()
                yield await loop.run_in_executor(self._pool, parse, data)
                return
        yield parse(data)


async def _read(context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            data = await context.read()
    except TimeoutError as error:
        raise CancelledError(
            f"the request did not come whole within {READ_S:g} s", remedy="Send it at once"
        ) from error
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise InvalidRequestError("the call has no request", remedy="Send one message")
    return data
