"""The routes of the Ollama API; each goes from fields to request input, outputs and answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from trtc.protos.errors import TrtcError, by_class
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.asgi import http_status
from trtc.runtime.frontends.http.bodies import read
from trtc.runtime.frontends.http.exchange import BodySizeError, BodyTypeError, Exchange
from trtc.runtime.frontends.http.failures import Kind, refusal_headers
from trtc.runtime.frontends.http.ollama.fields import ShowFields
from trtc.runtime.frontends.http.ollama.models import listed, loaded, shown, timestamp
from trtc.runtime.frontends.http.ollama.request_inputs import (
    CHAT,
    GENERATE,
    ParsedRequest,
    read_chat,
    read_generate,
)
from trtc.runtime.frontends.http.ollama.writing import (
    Form,
    Writer,
    chat_form,
    error_body,
    generate_form,
)
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.frontends.http.running import running
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.service import Service
from trtc.version import __version__

LATEST = ":latest"
"""The tag that Ollama's clients may append to a name."""
_STATUS: Mapping[type[TrtcError], HTTPStatus] = {
    BodySizeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    BodyTypeError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
}
"""Statuses that differ from `http_status`."""

T = TypeVar("T")
Read = Callable[[bytes, str], ParsedRequest[Any]]
"""Parses a body, given the request's id."""


def ollama(service: Service) -> Sequence[Route]:
    """The routes of chats, prompts, models and the version."""
    handlers = _Handlers(service)
    return (
        Route("/api/chat", {"POST": handlers.chat}, _refuse),
        Route("/api/generate", {"POST": handlers.generate}, _refuse),
        Route("/api/tags", {"GET": handlers.tags}, _refuse),
        Route("/api/show", {"POST": handlers.show}, _refuse),
        Route("/api/ps", {"GET": handlers.ps}, _refuse),
        Route("/api/version", {"GET": handlers.version}, _refuse),
    )


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._opened = timestamp()

    async def chat(self, exchange: Exchange) -> None:
        await self._ask(exchange, read_chat, CHAT, chat_form)

    async def generate(self, exchange: Exchange) -> None:
        await self._ask(exchange, read_generate, GENERATE, generate_form)

    async def tags(self, exchange: Exchange) -> None:
        models = [listed(one, self._opened) for one in self._engines(exchange.principal)]
        await _answer(exchange, {"models": models})

    async def ps(self, exchange: Exchange) -> None:
        models = [loaded(one) for one in self._engines(exchange.principal)]
        await _answer(exchange, {"models": models})

    async def show(self, exchange: Exchange) -> None:
        async with self._document(exchange, lambda body: read(body, ShowFields)) as given:
            name = self._name(given.fields.model or given.fields.name or "")
            handle = self._service.engine_for(exchange.principal, name)
        await _answer(exchange, shown(handle, self._opened))

    async def version(self, exchange: Exchange) -> None:
        await _answer(exchange, {"version": __version__})

    async def _ask(
        self, exchange: Exchange, read_body: Read, params: Mapping[str, str], form: Form
    ) -> None:
        begun_ns = time.monotonic_ns()
        request_id = f"ollama-{exchange.number}"
        service = self._service
        async with AsyncExitStack() as stack:
            with fields_as_sent(params):
                async with self._document(exchange, lambda body: read_body(body, request_id)) as (
                    parsed
                ):
                    fields = parsed.given.fields
                    name = self._name(fields.model or "")
                    handle = service.engine_for(exchange.principal, name)
                    outputs = None
                    if parsed.request_input is not None:
                        request_input = _fitting(
                            parsed, replace(parsed.request_input, model=name), handle
                        )
                        run = await stack.enter_async_context(
                            running(service, (request_input,), exchange.principal)
                        )
                        outputs = run.outputs
                writer = Writer(
                    exchange,
                    handle.name,
                    form,
                    ((b"x-request-id", request_id.encode()), *parsed.given.headers),
                    begun_ns,
                    returns_logprobs=bool(fields.logprobs),
                )
                if outputs is None:
                    await writer.loaded()
                elif fields.stream is False:
                    await writer.whole(outputs)
                else:
                    await writer.lines(outputs)

    def _document(
        self, exchange: Exchange, parse: Callable[[bytes], T]
    ) -> AbstractAsyncContextManager[T]:
        """The parsed body, of any content type: Ollama's users post with curl, which sends the type
        of a form."""
        limit = self._service.limits.max_request_bytes
        return exchange.document(self._service.intake, limit, parse, any_type=True)

    def _engines(self, principal: Principal) -> list[EngineHandle]:
        """The engines that `principal` may use."""
        infos = self._service.info("", principal)
        return [self._service.engine_for(principal, one.name) for one in infos]

    def _name(self, name: str) -> str:
        """Name of the engine for a client's model name, which may have a tag."""
        return name if name in self._service.names else name.removesuffix(LATEST)


def _fitting(
    parsed: ParsedRequest[Any], request_input: RequestInput, handle: EngineHandle
) -> RequestInput:
    """The request input, with the plain prompt if the model has no chat template, as in Ollama."""
    if request_input.chat is None or not parsed.plain_prompt or handle.info().has_chat_template:
        return request_input
    return replace(request_input, chat=None, text=parsed.plain_prompt)


async def _answer(exchange: Exchange, document: object) -> None:
    await exchange.answer(200, msgspec.json.encode(document))


async def _refuse(exchange: Exchange, error: TrtcError) -> None:
    status = by_class(_STATUS, error, http_status(error))
    kind = Kind(status, "", retries=status in (429, 503))  # Ollama's errors have no types
    await exchange.answer(status, error_body(error), headers=refusal_headers(kind, error))
