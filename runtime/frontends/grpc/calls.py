"""Parts that the handlers of all gRPC services share: reading, answering and failing a call.

Every method is registered with a stream of bytes as its request, which is the same on the wire as
one message. So a handler reads its request when its turn comes (`intake`), and a malformed request
gets INVALID_ARGUMENT instead of INTERNAL.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from trtc.protos.errors import CancelledError, TrtcError
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.requests.call import REQUEST_ID, answering, call_of
from trtc.runtime.requests.principal import Principal, Scope
from trtc.runtime.service.streams import OutputStream
from trtc.runtime.wire.bounded import parse
from trtc.runtime.wire.failures import to_status
from trtc.runtime.wire.methods import Method

CALL_METADATA = (REQUEST_ID, "traceparent", "tracestate")
Context = grpc.aio.ServicerContext[Any, Any]
AnswerT = TypeVar("AnswerT")
STALLED_CLIENT_S = 60
"""Seconds after which the stream of a client that reads no message is ended, to free its place."""


class GrpcService(NamedTuple):
    """One service of the port."""

    file: Any
    """Descriptor of the .proto that defines it, for reflection."""
    methods: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    probes: frozenset[str] = frozenset()
    """Names of methods that need no credentials (`probe`)."""


def unary(
    intake: Intake,
    method: Method[Any, Any],
    behaviour: Callable[[Any, Context], Awaitable[Message]],
    scope: Scope = Scope.INFERENCE,
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler with one request, which holds its turn if it is large. TrtcErrors become
    statuses."""
    return _unary(intake, partial(intake.caller, scope=scope), method, behaviour)


def probe(
    intake: Intake,
    method: Method[Any, Any],
    behaviour: Callable[[Any, Context], Awaitable[Message]],
) -> "grpc.RpcMethodHandler[Any, Any]":
    """`unary` for a call that needs no credentials."""
    return _unary(intake, intake.stranger, method, behaviour)


def _unary(
    intake: Intake,
    caller: Callable[[Context], Principal],
    method: Method[Any, Any],
    behaviour: Callable[[Any, Context], Awaitable[Message]],
) -> "grpc.RpcMethodHandler[Any, Any]":
    async def answer(context: Context) -> Message:
        read = partial(parse, method.request)
        async with intake.request(context, caller(context), read) as request:
            return await behaviour(request, context)

    return one_answer(method, answer)


def one_answer(
    method: Method[Any, Any], behaviour: Callable[[Context], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler that reads its requests itself and gives one answer. TrtcErrors become statuses."""

    async def handle(requests: object, context: Context) -> Message:
        async with _named(context):
            reply = await or_status(behaviour(context))
        if isinstance(reply, grpc.Status):
            await abort(context, reply)
        return reply

    return grpc.stream_unary_rpc_method_handler(
        handle, response_serializer=method.response.SerializeToString
    )


def streaming(
    method: Method[Any, Any], behaviour: Callable[[Context], Awaitable[None]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler that reads and writes itself. TrtcErrors become statuses.

    gRPC cancels it if the client cancels or disconnects, or its deadline passes.
    """

    async def handle(requests: object, context: Context) -> None:
        async with _named(context):
            status = await or_status(behaviour(context))
        if status is not None:
            await abort(context, status)

    return grpc.stream_stream_rpc_method_handler(
        handle, response_serializer=method.response.SerializeToString
    )


@asynccontextmanager
async def _named(context: Context) -> AsyncIterator[None]:
    """Set the current call with the client's id, and return the id in the metadata."""
    said = {
        name: value
        for name, value in context.invocation_metadata() or ()
        if name in CALL_METADATA and isinstance(value, str)
    }
    call = call_of(*(said.get(name, "") for name in CALL_METADATA))
    if call.is_named:
        await context.send_initial_metadata(((REQUEST_ID, call.id),))
    with answering(call):
        yield


@contextmanager
def writing(
    streams: Sequence[OutputStream], stalled_client_s: float = STALLED_CLIENT_S
) -> Iterator[None]:
    """Context manager around a write of outputs of `streams`.

    If the client does not read, `write` waits for as long as the connection lives. After
    `stalled_client_s` the streams fail, which frees their pages and places, while the write waits
    on: gRPC can neither cancel a write nor send a status before it.
    """
    timer = asyncio.get_running_loop().call_later(
        stalled_client_s, _stall, streams, stalled_client_s
    )
    try:
        yield
    except grpc.aio.InternalError as error:
        # The client has disconnected. gRPC would log this with a traceback.
        raise asyncio.CancelledError from error
    finally:
        timer.cancel()


def _stall(streams: Sequence[OutputStream], seconds: float) -> None:
    for stream in streams:
        stream.fail(
            CancelledError(
                f"the client took no message for {seconds:g} s",
                remedy="Read the stream as it comes",
            )
        )


def deadline(context: Context) -> float | None:
    """Deadline of the call in time.monotonic(); None: it has none."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


async def or_status(running: Awaitable[AnswerT]) -> AnswerT | grpc.Status:
    """The result of an awaitable, or the status of the TrtcError that it raises.

    The error ends here: gRPC keeps an aborted call in a reference cycle with the frames that
    aborted it, and those of an error hold the request until the garbage collector runs.
    """
    try:
        return await running
    except TrtcError as error:
        return to_status(error)


async def abort(context: Context, status: grpc.Status) -> NoReturn:
    """End the call with a status."""
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort always raises")
