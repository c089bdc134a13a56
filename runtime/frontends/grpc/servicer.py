"""trtc.v1.Inference over gRPC: messages in, messages out; every decision is the service's.

To gRPC's server every method takes a stream of bytes, which on the wire is the same as one message:
so a handler reads its request when its turn comes (`intake`), and what cannot be parsed is refused
with INVALID_ARGUMENT instead of INTERNAL.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trtc.protos.errors import (
    CancelledError,
    InvalidRequestError,
    RequestError,
    TrtcError,
)
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.frontends.grpc.caller import caller
from trtc.runtime.frontends.grpc.health import Health
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.requests.draft import RequestDraft
from trtc.runtime.requests.validation import check_number_of_stop_tokens, check_prompt_length
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.service.service import Service
from trtc.runtime.service.streams import OutputStream
from trtc.runtime.wire.bounded import MAX_NUMBERS, parse
from trtc.runtime.wire.channel import server_options
from trtc.runtime.wire.failures import to_status
from trtc.runtime.wire.messages import (
    chat_from_wire,
    draft_from_wire,
    info_to_wire,
    output_to_wire,
)
from trtc.runtime.wire.methods import (
    ABORT,
    DETOKENIZE,
    GENERATE,
    GET_MODEL_INFO,
    SERVICE,
    TOKENIZE,
    Method,
)
from trtc.runtime.wire.tls import ServerTls

Context = grpc.aio.ServicerContext[Any, Any]
AnswerT = TypeVar("AnswerT")
STALLED_CLIENT_S = 60
"""A client that takes no message for this long loses its stream: it holds a place of others."""


class InferenceServicer:
    """The handlers of trtc.v1.Inference."""

    def __init__(
        self, service: Service, intake: Intake, *, stalled_client_s: float = STALLED_CLIENT_S
    ) -> None:
        self._service = service
        self._intake = intake
        self._stalled_client_s = stalled_client_s

    def handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """What a grpc.aio server is given."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                GENERATE.name: grpc.stream_stream_rpc_method_handler(
                    self.generate,
                    response_serializer=GENERATE.response.SerializeToString,
                ),
                ABORT.name: self._unary(ABORT, self.abort),
                TOKENIZE.name: self._unary(TOKENIZE, self.tokenize),
                DETOKENIZE.name: self._unary(DETOKENIZE, self.detokenize),
                GET_MODEL_INFO.name: self._unary(GET_MODEL_INFO, self.get_model_info),
            },
        )

    async def generate(self, requests: object, context: Context) -> None:
        """Writes the outputs as they come. gRPC cancels this coroutine when the client cancels,
        vanishes or runs out of time; leaving the service's context then frees the pages."""
        status = await _or_status(self._generate(context))
        if status is not None:
            await _abort(context, status)

    async def _generate(self, context: Context) -> None:
        principal = caller(context)
        async with AsyncExitStack() as running:
            async with self._intake.request(context, principal, self._draft) as draft:
                generation = self._service.generate(
                    draft, principal=principal, deadline=_deadline(context)
                )
                del draft
                stream = await running.enter_async_context(generation)
            await self._write(stream, context)

    def _draft(self, data: bytes) -> RequestDraft:
        """Lengths are checked before there is a Python object for every number."""
        engines = self._service.engines.values()
        longest = max((engine.loop.bounds.max_context for engine in engines), default=0)
        request = parse(GENERATE.request, data, max_numbers=MAX_NUMBERS + longest)
        if request.WhichOneof("prompt") == "token_ids":
            bounds = self._service.engine(request.model).loop.bounds
            check_prompt_length(len(request.token_ids.ids), bounds)
        check_number_of_stop_tokens(len(request.stop_token_ids))
        return draft_from_wire(request)

    async def _write(self, stream: OutputStream, context: Context) -> None:
        """A client that takes nothing makes `write` wait for as long as its connection lives. The
        stream then fails, which frees its pages and its place, while this coroutine waits on: gRPC
        can neither give up a write nor send a status past it."""
        loop = asyncio.get_running_loop()
        async for outputs in stream:
            timer = loop.call_later(self._stalled_client_s, self._stall, stream)
            try:
                for output in outputs:
                    await context.write(output_to_wire(output))
            except grpc.aio.InternalError as error:
                # The client has gone meanwhile. gRPC would log this with a traceback.
                raise asyncio.CancelledError from error
            finally:
                timer.cancel()

    def _stall(self, stream: OutputStream) -> None:
        stream.fail(
            CancelledError(
                f"the client took no message for {self._stalled_client_s:g} s",
                remedy="Read the stream as it comes",
            )
        )

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self._service.abort(request.model, request.request_id, caller(context))
        return pb.AbortResponse()

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError("is missing", field="input", remedy="Give text or chat")
        if kind == "chat":
            token_ids = await self._service.tokenize_chat(
                request.model, chat_from_wire(request.chat), caller(context)
            )
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            token_ids = await self._service.tokenize_text(
                request.model, request.text, special, caller(context)
            )
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        text = await self._service.detokenize(
            request.model,
            request.token_ids,
            request.keep_special_tokens,
            caller(context),
        )
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        infos = self._service.info(request.model)
        return pb.GetModelInfoResponse(models=[info_to_wire(info) for info in infos])

    def _unary(
        self, method: Method[Any, Any], behaviour: Callable[[Any, Context], Awaitable[Message]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler whose known errors become statuses."""

        async def answer(context: Context) -> Message:
            read = partial(parse, method.request)
            async with self._intake.request(context, caller(context), read) as request:
                return await behaviour(request, context)

        async def handle(requests: object, context: Context) -> Message:
            reply = await _or_status(answer(context))
            if isinstance(reply, grpc.Status):
                await _abort(context, reply)
            return reply

        return grpc.stream_unary_rpc_method_handler(
            handle, response_serializer=method.response.SerializeToString
        )


def make_server(
    servicer: InferenceServicer, status: Health, limits: ServiceLimits
) -> grpc.aio.Server:
    """A server with inference, health and reflection; it listens once ports are bound."""
    options = server_options(
        max_connection_calls=limits.max_connection_streams,
        max_connections=limits.max_connections,
        max_request_bytes=limits.max_request_bytes,
    )
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((servicer.handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return server


def bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    """Bind `host:port`; returns the port, which the system chose when 0 was asked.

    Raises:
        RequestError: the address cannot be had, or a TLS file cannot be read.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _try_port(host, port)
        bound = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.credentials())
        )
    except (RuntimeError, OSError) as error:
        raise RequestError(
            f"cannot listen on {address}",
            field="--grpc-port",
            remedy="It may be in use: choose another port or host, or 0 for any free port",
        ) from error
    return int(bound)


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _try_port(host: str, port: int) -> None:
    """Bind and let go: gRPC writes lines of its own to stderr when it cannot.

    Raises:
        OSError: the address cannot be had.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(place)


async def _or_status(running: Awaitable[AnswerT]) -> AnswerT | grpc.Status:
    """What it returns, or the status of the error that it raises.

    The error ends here: gRPC keeps an aborted call in a reference cycle with the frames that
    aborted it, and those of an error hold the request until the garbage collector runs.
    """
    try:
        return await running
    except TrtcError as error:
        return to_status(error)


async def _abort(context: Context, status: grpc.Status) -> NoReturn:
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort always raises")
