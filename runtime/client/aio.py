"""The asyncio client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from trtc.protos.errors import CancelledError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import calls
from trtc.runtime.client.base import BaseClient, RemoteGeneration
from trtc.runtime.client.calls import AnswerT, Call, closed_client
from trtc.runtime.requests.completion import Result
from trtc.runtime.requests.generate_options import TEMPLATE_KEYWORDS
from trtc.runtime.requests.keywords import takes
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.text.template_options import Message, TemplateOptions
from trtc.runtime.wire.channel import CLIENT_OPTIONS
from trtc.runtime.wire.failures import to_error
from trtc.runtime.wire.messages import input_to_wire
from trtc.runtime.wire.methods import GENERATE, RequestT, ResponseT
from trtc.runtime.wire.tls import ClientTls


class AsyncGeneration(RemoteGeneration, AsyncIterator[Output]):
    """A running completion: iterate over its outputs, or await all of it with `result`.

    Leaving its `async with` block, or dropping it, cancels the request if it has not ended.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, bytes],
        request_id: str,
        address: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(request_id, address)
        self._call = call
        self._loop = loop
        self._responses = aiter(call)
        self._cancelled = False

    async def __anext__(self) -> Output:
        if self._cancelled:
            raise CancelledError("the request was cancelled by this client")
        try:
            message = await anext(self._responses)
        except StopAsyncIteration:
            self._collector.check_complete()
            raise
        except asyncio.CancelledError as cancellation:
            if _is_tasks_own():
                raise
            raise CancelledError("the request was cancelled by this client") from cancellation
        except grpc.RpcError as failure:
            raise to_error(failure, self._address) from failure
        return self._take(message)

    async def result(self) -> Result:
        """Read the remaining outputs and return the complete result."""
        async for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """End the request; further reads raise CancelledError."""
        self._cancelled = self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        """Cancel the call, which would otherwise run to its end: gRPC's tasks keep it alive."""
        if not self._call.done():
            # The garbage collector may run in another thread.
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and its calls too
                self._loop.call_soon_threadsafe(self._call.cancel)


def _is_tasks_own() -> bool:
    """Whether asyncio's CancelledError is for the running task, and not for its gRPC call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient(BaseClient[AsyncGeneration]):
    """`Client` for asyncio. Create and use it in one running event loop.

    Args:
        address: `host:port`.
        tls: PEM files; None for a plain connection.
        api_key: a key of the server's --api-keys; sent with every call, unencrypted without `tls`.
        timeout: default timeout of each call in seconds; None for no limit.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        tls: ClientTls | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(address, timeout, api_key)
        self._channel = (
            grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), options=CLIENT_OPTIONS)
        )
        self._generate = GENERATE.over(self._channel.unary_stream)

    def submit(
        self, request_input: RequestInput, *, timeout: float | None = None
    ) -> AsyncGeneration:
        """Send a request."""
        loop = asyncio.get_running_loop()
        request = input_to_wire(request_input)
        try:
            call = self._generate(request, timeout=self._seconds(timeout), metadata=self._metadata)
        except grpc.aio.UsageError as failure:
            raise closed_client(self.address) from failure
        return AsyncGeneration(call, request_input.request_id, self.address, loop)

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The token ids that `generate` would use for `text`."""
        return await self._ask(calls.tokenize(text, model, add_special_tokens))

    @takes(TEMPLATE_KEYWORDS)
    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        **options: Unpack[TemplateOptions],
    ) -> tuple[int, ...]:
        """The token ids that `chat` would use."""
        return await self._ask(calls.tokenize_chat(messages, model, options))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False
    ) -> str:
        return await self._ask(calls.detokenize(token_ids, model, keep_special_tokens))

    async def info(self, model: str = "") -> tuple[ModelInfo, ...]:
        """The engine called `model`, or all of them."""
        return await self._ask(calls.info(model))

    async def abort(self, request_id: str, *, model: str = "") -> None:
        """End a running request; its stream closes with finish reason ABORTED.

        Raises:
            UnknownRequestError: no such request is running.
        """
        await self._ask(calls.abort(request_id, model))

    async def _ask(self, call: Call[RequestT, ResponseT, AnswerT]) -> AnswerT:
        send = call.method.over(self._channel.unary_unary)
        try:
            reply: bytes = await send(call.request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise to_error(failure, self.address) from failure
        except asyncio.CancelledError as cancellation:
            if _is_tasks_own():
                raise
            raise closed_client(self.address) from cancellation
        except grpc.aio.UsageError as failure:
            raise closed_client(self.address) from failure
        return call.answer(reply)

    async def close(self) -> None:
        """Close the connection; running generations are cancelled."""
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
