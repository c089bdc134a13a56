"""The routes of KServe's protocol: /v2 and below."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from trtc.protos.errors import TrtcError, UnknownModelError, UnsupportedError, by_class
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.asgi import error_headers, http_status
from trtc.runtime.frontends.http.bodies import decoded
from trtc.runtime.frontends.http.events import begin_events
from trtc.runtime.frontends.http.exchange import BodySizeError, BodyTypeError, Exchange
from trtc.runtime.frontends.http.kserve.generation import read_generate, written_generate
from trtc.runtime.frontends.http.kserve.infer import (
    HEADER_LENGTH,
    InferBody,
    read_infer,
    written_infer,
)
from trtc.runtime.frontends.http.kserve.reading import API
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.requests.principal import Principal, Scope
from trtc.runtime.service.service import Service
from trtc.runtime.tensors import model
from trtc.runtime.tensors.inference import Inference, InferRequest

BINARY = b"application/octet-stream"
MODELS = "/v2/models/"
REPOSITORY = "/v2/repository/models/"
_VERSIONS = "versions/"
_NOT_READY = HTTPStatus.BAD_REQUEST
"""Status of a model that is not ready, by KServe's specification."""

_STATUS: Mapping[type[TrtcError], HTTPStatus] = {
    UnsupportedError: HTTPStatus.NOT_IMPLEMENTED,
    BodySizeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    BodyTypeError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
}
"""Statuses that differ from `http_status`."""

T = TypeVar("T")


Order = Callable[[Service, Principal, str, str, model.Parameters], Awaitable[None]]


class _IndexFields(msgspec.Struct):
    ready: bool = False


class _OrderFields(msgspec.Struct):
    parameters: dict[str, bool | int | str] = {}


def kserve(service: Service) -> Sequence[Route]:
    """The routes of health, models, inference and generation."""
    handlers = _Handlers(service)
    return (
        Route("/v2", {"GET": handlers.server}, _refuse),
        Route("/v2/health/live", {"GET": handlers.live}, _refuse, scope=None, is_probe=True),
        Route("/v2/health/ready", {"GET": handlers.ready}, _refuse, scope=None, is_probe=True),
        Route("/v2/models/stats", {"GET": handlers.all_statistics}, _refuse, scope=Scope.METRICS),
        Route(MODELS, {"GET": handlers.get, "POST": handlers.ask}, _refuse),
        Route("/v2/repository/index", {"POST": handlers.index}, _refuse),
        Route(REPOSITORY, {"POST": handlers.order}, _refuse, scope=Scope.ADMIN),
    )


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._inference = Inference(service)

    async def server(self, exchange: Exchange) -> None:
        await _answer(exchange, model.server_metadata("binary_tensor_data", "generate"))

    async def live(self, exchange: Exchange) -> None:
        await exchange.answer(200, b"")

    async def ready(self, exchange: Exchange) -> None:
        await exchange.answer(_NOT_READY if self._service.why_not_ready() else 200, b"")

    async def all_statistics(self, exchange: Exchange) -> None:
        engines = model.engines_of(self._service, exchange.principal)
        statistics = [model.statistics(self._service, one) for one in engines]
        await _answer(exchange, {"model_stats": statistics})

    async def index(self, exchange: Exchange) -> None:
        def parse(body: bytes) -> _IndexFields:
            return decoded(body or b"{}", _IndexFields, API)

        async with self._body(exchange, parse) as fields:
            entries = await model.index(
                self._service, exchange.principal, repository="", ready=fields.ready
            )
        await _answer(exchange, entries)

    async def order(self, exchange: Exchange) -> None:
        """Load or unload a model."""
        name, _, what = exchange.path.removeprefix(REPOSITORY).rpartition("/")
        orders: Mapping[str, Order] = {"load": model.load, "unload": model.unload}
        if what not in orders:
            raise UnknownModelError(
                "is not there",
                field=exchange.path[:200],
                remedy=f"Post to {REPOSITORY}NAME/load or /unload",
            )

        def parse(body: bytes) -> _OrderFields:
            return decoded(body or b"{}", _OrderFields, API)

        async with self._body(exchange, parse) as fields:
            await orders[what](self._service, exchange.principal, name, "", fields.parameters)
        await exchange.answer(200, b"")

    async def get(self, exchange: Exchange) -> None:
        """Metadata, readiness, configuration and statistics of a model."""
        place = _place(exchange.path, self._service.names)
        if place.what == "ready":
            ready = model.is_ready(self._service, exchange.principal, place.model, place.version)
            await exchange.answer(200 if ready else _NOT_READY, b"")
            return
        answers: Mapping[str, Callable[[EngineHandle], dict[str, Any]]] = {
            "": model.metadata,
            "config": model.config,
            "stats": lambda one: {"model_stats": [model.statistics(self._service, one)]},
        }
        if place.what not in answers:
            raise _no_such_path(exchange.path)
        if place.what == "stats":
            self._service.access.admit(exchange.peer, Scope.METRICS)
        handle = model.engine_of(self._service, exchange.principal, place.model, place.version)
        await _answer(exchange, answers[place.what](handle))

    async def ask(self, exchange: Exchange) -> None:
        """Inference and generation."""
        place = _place(exchange.path, self._service.names)
        answers: Mapping[str, Callable[[Exchange, _Place], Awaitable[None]]] = {
            "infer": self._infer,
            "generate": self._generate,
            "generate_stream": self._generate_stream,
        }
        if place.what not in answers:
            raise _no_such_path(exchange.path)
        await answers[place.what](exchange, place)

    async def _infer(self, exchange: Exchange, place: "_Place") -> None:
        header_length = exchange.header(HEADER_LENGTH)

        def parse(body: bytes) -> tuple[InferBody, InferRequest]:
            said = read_infer(body, header_length)
            request = self._inference.read(
                place.model,
                place.version,
                said.request_id,
                said.tensors,
                said.outputs,
                said.parameters,
            )
            request.check_one_reply()
            return said, request

        async with AsyncExitStack() as running:
            async with self._body(exchange, parse) as (said, request):
                run = self._inference.run(request, exchange.principal, None)
                answering = await running.enter_async_context(run)
            message = await answering.reply()
        body, length = written_infer(answering.request, said, message)
        if length is None:
            await exchange.answer(200, body)
            return
        headers = ((HEADER_LENGTH, b"%d" % length),)
        await exchange.answer(200, body, content_type=BINARY, headers=headers)

    async def _generate(self, exchange: Exchange, place: "_Place") -> None:
        def parse(body: bytes) -> InferRequest:
            request = self._read_generate(body, place)
            request.check_one_reply()
            return request

        async with AsyncExitStack() as running:
            async with self._body(exchange, parse) as request:
                run = self._inference.run(request, exchange.principal, None)
                answering = await running.enter_async_context(run)
            message = await answering.reply()
        body = written_generate(answering.request, message)
        await exchange.answer(200, body)

    async def _generate_stream(self, exchange: Exchange, place: "_Place") -> None:
        """One event per message; an error ends the stream as its last event."""
        async with AsyncExitStack() as running:
            async with self._body(
                exchange, lambda body: self._read_generate(body, place)
            ) as request:
                run = self._inference.run(request, exchange.principal, None)
                answering = await running.enter_async_context(run)
            await begin_events(exchange)
            try:
                async with aclosing(answering.replies()) as arriving:
                    async for replies in arriving:
                        bodies = [
                            written_generate(answering.request, one.message) for one in replies
                        ]
                        await exchange.write(b"".join(map(_event, bodies)))
            except TrtcError as error:
                await exchange.end(_event(_error_body(error)))
                return
            await exchange.end()

    def _read_generate(self, body: bytes, place: "_Place") -> InferRequest:
        said = read_generate(body)
        return self._inference.read(
            place.model, place.version, said.request_id, said.tensors, (), said.parameters
        )

    def _body(
        self, exchange: Exchange, parse: Callable[[bytes], T]
    ) -> AbstractAsyncContextManager[T]:
        limit = self._service.limits.max_request_bytes
        return exchange.document(self._service.intake, limit, parse, any_type=True)


@dataclass(frozen=True)
class _Place:
    """A parsed path below MODELS."""

    model: str
    version: str
    what: str


def _place(path: str, names: Sequence[str]) -> _Place:
    """`NAME`, `NAME/WHAT`, `NAME/versions/VERSION` or `NAME/versions/VERSION/WHAT`; names may
    have slashes."""
    below = path.removeprefix(MODELS)
    served = [name for name in names if f"{below}/".startswith(f"{name}/")]
    name = max(served, key=len, default=below.partition("/")[0])
    rest, version = below[len(name) + 1 :], ""
    if rest.startswith(_VERSIONS):
        version, _, rest = rest.removeprefix(_VERSIONS).partition("/")
    return _Place(name, version, rest)


def _no_such_path(path: str) -> UnknownModelError:
    return UnknownModelError(
        "is not there",
        field=path[:200],
        remedy=f"Ask for {MODELS}NAME, its /ready, /config and /stats, or post to its /infer, "
        "/generate or /generate_stream",
    )


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def _error_body(error: TrtcError) -> bytes:
    return msgspec.json.encode({"error": str(error)})


async def _refuse(exchange: Exchange, error: TrtcError) -> None:
    status = by_class(_STATUS, error, http_status(error))
    await exchange.answer(status, _error_body(error), headers=error_headers(error))


async def _answer(exchange: Exchange, document: object) -> None:
    await exchange.answer(200, msgspec.json.encode(document))
