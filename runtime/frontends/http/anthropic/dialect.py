"""The routes of Anthropic's API; each goes from fields to request input, outputs and answer."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from trtc.protos.errors import InvalidRequestError, TrtcError
from trtc.runtime.frontends.http.anthropic.failures import (
    failure,
    id_headers,
    refuse,
    request_id,
)
from trtc.runtime.frontends.http.anthropic.fields import CountFields, MessageFields
from trtc.runtime.frontends.http.anthropic.message import Message, encoded
from trtc.runtime.frontends.http.anthropic.request_inputs import PARAMS, counted, message_input
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.events import begin_events, event
from trtc.runtime.frontends.http.exchange import Exchange, Headers
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.frontends.http.running import unaborted
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.service import Service
from trtc.runtime.text.chat import Chat

VERSIONS = ("2023-06-01", "2026-10-21")
"""Versions of the API, as in its header, whose streams have named events. The second has no
sampling parameters, which this server accepts nevertheless."""

_BETA = b"anthropic-beta"
"""Header of beta features."""

T = TypeVar("T")


def anthropic(service: Service) -> Sequence[Route]:
    """The routes of messages and of token counting."""
    handlers = _Handlers(service)
    return (
        Route("/v1/messages", {"POST": handlers.create}, refuse),
        Route("/v1/messages/count_tokens", {"POST": handlers.count}, refuse),
    )


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, exchange: Exchange) -> None:
        """Answer with a message."""

        def parse(body: bytes) -> tuple[Given[MessageFields], RequestInput]:
            given = read(body, MessageFields)
            return given, message_input(given.fields, request_id(exchange))

        async with AsyncExitStack() as stack:
            async with self._document(exchange, parse) as (given, request_input):
                with fields_as_sent(PARAMS):
                    engine = stack.enter_context(self._service.models.lease(request_input.model))
                    stream = await stack.enter_async_context(
                        self._service.generate(
                            request_input, principal=exchange.principal, engine=engine
                        )
                    )
            message = Message(
                id=f"msg_{exchange.number}",
                model=engine.name,
                num_prompt_tokens=len(stream.prompt_ids),
                stop_sequences=frozenset(request_input.stop),
                returns_ids=bool(given.fields.return_token_ids),
            )
            write = _write_events if given.fields.stream else _write_whole
            with fields_as_sent(PARAMS):
                await write(exchange, unaborted(stream), message, _headers(exchange, given))

    async def count(self, exchange: Exchange) -> None:
        """Answer with the number of tokens of a conversation."""

        def parse(body: bytes) -> tuple[Given[CountFields], Chat]:
            given = read(body, CountFields)
            return given, counted(given.fields)

        async with self._document(exchange, parse) as (given, chat):
            with fields_as_sent(PARAMS):
                ids = await self._service.tokenize_chat(
                    given.fields.model or "", chat, exchange.principal
                )
        body = msgspec.json.encode({"input_tokens": len(ids)})
        await exchange.answer(200, body, headers=_headers(exchange, given))

    def _document(
        self, exchange: Exchange, parse: Callable[[bytes], T]
    ) -> AbstractAsyncContextManager[T]:
        version = exchange.header(b"anthropic-version").decode("latin-1")
        if version not in ("", *VERSIONS):
            raise InvalidRequestError(
                f"is {version[:40]!r}",
                field="anthropic-version",
                remedy=f"Send one of {', '.join(VERSIONS)}, or leave it out",
            )
        service = self._service
        return exchange.document(service.intake, service.limits.max_request_bytes, parse)


def _headers(exchange: Exchange, given: Given[Any]) -> Headers:
    if exchange.header(_BETA):
        given = replace(given, ignored=(*given.ignored, _BETA.decode()))
    return (*id_headers(exchange), *given.headers)


async def _write_whole(
    exchange: Exchange,
    arriving: AsyncIterator[Sequence[Output]],
    message: Message,
    headers: Headers,
) -> None:
    async for outputs in arriving:
        for output in outputs:
            message.take(output)
    await exchange.answer(200, msgspec.json.encode(message.whole()), headers=headers)


async def _write_events(
    exchange: Exchange,
    arriving: AsyncIterator[Sequence[Output]],
    message: Message,
    headers: Headers,
) -> None:
    """An error ends the stream as its last event."""
    await begin_events(exchange, headers)
    await exchange.write(message.first_events())
    try:
        async for outputs in arriving:
            events = [one for output in outputs for one in message.take(output)]
            if events:
                await exchange.write(encoded(events))
    except TrtcError as error:
        await exchange.end(event(failure(exchange, error), "error"))
        return
    await exchange.end(message.last_events())
