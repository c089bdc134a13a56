"""Requests of gRPC calls on their way in: in turns (`service.intake`), and no faster cancelled than
opened (`resets`)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from trtc.protos.errors import CancelledError, InvalidRequestError
from trtc.runtime.frontends.grpc.caller import caller, stranger
from trtc.runtime.frontends.grpc.resets import Resets
from trtc.runtime.requests.principal import Principal, Scope
from trtc.runtime.service import intake
from trtc.runtime.service.access import Access
from trtc.runtime.service.fair_turns import FairTurns
from trtc.runtime.service.intake import TURN_S

MAX_LISTENING = 512
"""Calls that may send further requests at a time. What they send without being asked for it is read
before its turn: at the worst, a request of the largest size each."""
IDLE_S = 600.0
"""A call that listens ends after this time without a request."""
_NAME = "the server's places for calls that send several requests"

RequestT = TypeVar("RequestT")


class Intake:
    """Reads and parses the requests of calls that `access` admits, in turns with those of other
    ports."""

    def __init__(self, turns: intake.Intake, access: Access) -> None:
        self._turns = turns
        self._access = access
        self._resets = Resets()
        # Nobody has all places: neither a host, nor a tenant, nor a connection of a host.
        self._clients = FairTurns(MAX_LISTENING, MAX_LISTENING // 4, TURN_S, _NAME)
        self._hosts = FairTurns(MAX_LISTENING, MAX_LISTENING * 3 // 4, TURN_S, _NAME)

    def caller(
        self, context: "grpc.aio.ServicerContext[Any, Any]", scope: Scope = Scope.INFERENCE
    ) -> Principal:
        """Who makes a call.

        Raises:
            UnauthenticatedError: a credential is missing or unknown.
            ForbiddenError: whoever it is may not ask for `scope`.
        """
        return caller(context, self._access, scope)

    def stranger(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Principal:
        """Who makes a call for which nobody needs credentials."""
        return stranger(context, self._access)

    def drain(self) -> None:
        """Calls that were cancelled end at once from now on."""
        self._resets.close()

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
        async with AsyncExitStack() as turn:
            reading = self._turns.request(principal, partial(_read, context), parse)
            try:
                request = await turn.enter_async_context(reading)
            except asyncio.CancelledError:
                await self._resets.hold(principal.group)
                raise
            yield request

    @asynccontextmanager
    async def listening(
        self, context: "grpc.aio.ServicerContext[Any, Any]", principal: Principal
    ) -> AsyncIterator["Listener"]:
        """Hear the requests of a call that sends several, whenever it does.

        Raises:
            QueueFullError: too many calls listen.
        """
        async with AsyncExitStack() as places:
            try:
                if principal.is_anonymous:
                    await places.enter_async_context(self._clients.turn(principal.name))
                await places.enter_async_context(self._hosts.turn(principal.group))
                first = await _next(context, is_busy=lambda: False)
            except asyncio.CancelledError:
                await places.aclose()
                await self._resets.hold(principal.group)
                raise
            yield Listener(context, first)

    @asynccontextmanager
    async def parsed(
        self, principal: Principal, data: bytes, parse: Callable[[bytes], RequestT]
    ) -> AsyncIterator[RequestT]:
        """What `parse` makes of a request that was heard; as `request` otherwise."""

        async def heard() -> bytes:
            return data

        async with self._turns.request(principal, heard, parse) as request:
            yield request


class Listener:
    """The requests of one call."""

    def __init__(self, context: "grpc.aio.ServicerContext[Any, Any]", first: bytes | None) -> None:
        self._context = context
        self._first = first
        self._heard_first = False

    async def next(self, is_busy: Callable[[], bool]) -> bytes | None:
        """The next request; None: there will be no other.

        Args:
            is_busy: whether earlier ones are being answered, so that the call is not idle.

        Raises:
            CancelledError: the call was idle for too long.
        """
        if self._heard_first:
            return await _next(self._context, is_busy)
        self._heard_first = True
        return self._first


async def _next(
    context: "grpc.aio.ServicerContext[Any, Any]", is_busy: Callable[[], bool]
) -> bytes | None:
    reading = asyncio.ensure_future(context.read())
    try:
        while not (await asyncio.wait((reading,), timeout=IDLE_S))[0]:
            if not is_busy():
                raise CancelledError(
                    f"the call sent no request for {IDLE_S:g} s", remedy="Open another when needed"
                )
        data = reading.result()
        return data if isinstance(data, bytes) else None  # grpc.aio.EOF
    finally:
        reading.cancel()


async def _read(context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
    data = await context.read()
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise InvalidRequestError("the call has no request", remedy="Send one message")
    return data
