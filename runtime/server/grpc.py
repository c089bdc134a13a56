"""trtc.v1.Inference over gRPC: messages in, messages out; every decision is the service's.

A request that cannot be parsed (a string that is not UTF-8) would be INTERNAL in gRPC's own
handling, before any handler runs; here parsing gives `Unreadable`, which a handler refuses with
INVALID_ARGUMENT.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trtc.protos.errors import (
    CancelledError,
    InvalidRequestError,
    RequestError,
    TrtcError,
)
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.server.health import Health
from trtc.runtime.server.service import Service
from trtc.runtime.server.streams import OutputStream
from trtc.runtime.wire.channel import SERVER_OPTIONS, ServerTls
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

Context = grpc.aio.ServicerContext[Any, Any]
STALLED_CLIENT_S = 60
"""A client that takes no message for this long loses its stream: it holds a place of others."""


@dataclass(frozen=True)
class Unreadable:
    """Bytes that are not the message that the method takes."""

    problem: str


class InferenceServicer:
    """The handlers of trtc.v1.Inference."""

    def __init__(self, service: Service, *, stalled_client_s: float = STALLED_CLIENT_S) -> None:
        self._service = service
        self._stalled_client_s = stalled_client_s

    def handlers(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """What a grpc.aio server is given."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                GENERATE.name: grpc.unary_stream_rpc_method_handler(
                    self.generate,
                    request_deserializer=_reader(GENERATE.request),
                    response_serializer=GENERATE.response.SerializeToString,
                ),
                ABORT.name: _unary(ABORT, self.abort),
                TOKENIZE.name: _unary(TOKENIZE, self.tokenize),
                DETOKENIZE.name: _unary(DETOKENIZE, self.detokenize),
                GET_MODEL_INFO.name: _unary(GET_MODEL_INFO, self.get_model_info),
            },
        )

    async def generate(self, request: pb.GenerateRequest | Unreadable, context: Context) -> None:
        """Writes the outputs as they come. gRPC cancels this coroutine when the client cancels,
        vanishes or runs out of time; leaving the service's context then frees the pages."""
        try:
            draft = draft_from_wire(_readable(request))
            async with self._service.generate(draft, deadline=_deadline(context)) as stream:
                await self._write(stream, context)
        except TrtcError as error:
            await _abort(context, error)

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
        self._service.abort(request.model, request.request_id)
        return pb.AbortResponse()

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError("is missing", field="input", remedy="Give text or chat")
        if kind == "chat":
            token_ids = await self._service.tokenize_chat(
                request.model, chat_from_wire(request.chat)
            )
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            token_ids = await self._service.tokenize_text(request.model, request.text, special)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        text = await self._service.detokenize(
            request.model, tuple(request.token_ids), request.keep_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        infos = self._service.info(request.model)
        return pb.GetModelInfoResponse(models=[info_to_wire(info) for info in infos])


def make_server(
    servicer: InferenceServicer, status: Health, *, max_concurrent_rpcs: int | None = None
) -> grpc.aio.Server:
    """A server with inference, health and reflection; it listens once ports are bound."""
    options = list(SERVER_OPTIONS)
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_concurrent_rpcs)
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
        bound = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.credentials())
        )
    except RuntimeError as error:
        raise RequestError(
            f"cannot listen on {address}",
            field="--grpc-port",
            remedy="It may be in use: choose another port or host, or 0 for any free port",
        ) from error
    return int(bound)


def _unary(
    method: Method[Any, Any], behaviour: Callable[[Any, Context], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler whose known errors become statuses."""

    async def handle(request: Message | Unreadable, context: Context) -> Message:
        try:
            return await behaviour(_readable(request), context)
        except TrtcError as error:
            await _abort(context, error)

    return grpc.unary_unary_rpc_method_handler(
        handle,
        request_deserializer=_reader(method.request),
        response_serializer=method.response.SerializeToString,
    )


def _reader(kind: type[Message]) -> Callable[[bytes], Message | Unreadable]:
    def read(data: bytes) -> Message | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return Unreadable(str(error))

    return read


def _readable(request: Any) -> Any:
    if isinstance(request, Unreadable):
        raise InvalidRequestError(
            f"the request is not a valid message ({request.problem})",
            remedy="Strings must be UTF-8; use stubs generated from trtc/v1/inference.proto",
        )
    return request


def _deadline(context: Context) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


async def _abort(context: Context, error: TrtcError) -> NoReturn:
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort always raises")
