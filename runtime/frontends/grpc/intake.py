"""Requests of gRPC calls on their way in: in turns (`service.intake`), and no faster cancelled than
opened (`resets`)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.grpc.resets import Resets
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service import intake

RequestT = TypeVar("RequestT")


class Intake:
    """Reads and parses the requests of calls, in turns with those of other ports."""

    def __init__(self, turns: intake.Intake) -> None:
        self._turns = turns
        self._resets = Resets()

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


async def _read(context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
    data = await context.read()
    if not isinstance(data, bytes):  # grpc.aio.EOF
        raise InvalidRequestError("the call has no request", remedy="Send one message")
    return data
