"""Reads the requests of gRPC calls: in turns (`service.intake`), and with a limited rate of
cancelled calls (`resets`)."""

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
"""Most concurrent calls that may send further requests. gRPC reads one request of each before its
turn: in the worst case each of the largest size."""
IDLE_S = 600.0
"""Seconds without a request after which a call with several requests is ended."""
_NAME = "the server's places for calls that send several requests"

RequestT = TypeVar("RequestT")


class Intake:
    """Reads and parses the requests of calls that `access` admits, in turns with those of other
    ports."""

    def __init__(self, turns: intake.Intake, access: Access) -> None:
        self._turns = turns
        self._access = access
        self._resets = Resets()
        # No client has all places: neither a host, nor a tenant, nor a connection of a host.
        self._clients = FairTurns(MAX_LISTENING, MAX_LISTENING // 4, TURN_S, _NAME)
        self._hosts = FairTurns(MAX_LISTENING, MAX_LISTENING * 3 // 4, TURN_S, _NAME)

    def caller(
        self, context: "grpc.aio.ServicerContext[Any, Any]", scope: Scope = Scope.INFERENCE
    ) -> Principal:
        """The principal of a call.

        Raises:
            UnauthenticatedError: a credential is missing or unknown.
            ForbiddenError: the caller has not the scope.
        """
        return caller(context, self._access, scope)

    def stranger(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Principal:
        """The principal of a call that needs no credentials."""
        return stranger(context, self._access)

    def drain(self) -> None:
        """End cancelled calls at once from now on."""
        self._resets.close()

    @asynccontextmanager
    async def request(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        principal: Principal,
        parse: Callable[[bytes], RequestT],
    ) -> AsyncIterator[RequestT]:
        """The call's only request, parsed by `parse`. Leave the context as soon as the request is
        admitted: until then a large one holds its turn.

        Raises:
            InvalidRequestError: there is no request. Also raises the errors of `parse`.
            CancelledError: the request did not arrive in time.
            QueueFullError: there was no turn in time.
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
        """A listener for the requests of a call that sends several.

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
        """Like `request`, for the bytes of a request from a Listener."""

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
            is_busy: returns whether earlier requests are being answered, so the call is not idle.

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
