"""The asyncio client."""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from trtc.protos.errors import CancelledError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import calls
from trtc.runtime.client.calls import AnswerT, Call
from trtc.runtime.completion import Collector, Result
from trtc.runtime.draft import RequestDraft
from trtc.runtime.generate_options import GenerateOptions, draft_of_chat, draft_of_prompt
from trtc.runtime.model_info import ModelInfo
from trtc.runtime.request import Output
from trtc.runtime.wire.channel import CLIENT_OPTIONS, ClientTls
from trtc.runtime.wire.failures import to_error
from trtc.runtime.wire.messages import draft_to_wire, output_from_wire
from trtc.runtime.wire.methods import GENERATE, RequestT, ResponseT


class AsyncGeneration(AsyncIterator[Output]):
    """A completion on its way: iterate over its outputs, or await all of it with `result`.

    Leaving it as a context manager cancels what has not come.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse],
        request_id: str,
        address: str,
    ) -> None:
        self._call = call
        self._responses = aiter(call)
        self._address = address
        self._collector = Collector()
        self._cancelled = False
        self.request_id = request_id

    async def __anext__(self) -> Output:
        if self._cancelled:
            raise CancelledError("the request was cancelled by this client")
        try:
            output = output_from_wire(await anext(self._responses))
        except grpc.RpcError as failure:
            raise to_error(failure, self._address) from failure
        self._collector.add(output)
        return output

    async def result(self) -> Result:
        """Read what has not been read yet and return the whole."""
        async for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """End the request; reading on raises CancelledError."""
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


class AsyncClient:
    """`Client` for asyncio: make it and use it inside one running event loop.

    Args:
        address: `host:port`.
        tls: PEM files; None for a plain connection.
        timeout: seconds that each call may take, unless it says otherwise; None for no limit.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        tls: ClientTls | None = None,
        timeout: float | None = None,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._channel = (
            grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), options=CLIENT_OPTIONS)
        )
        self._generate = GENERATE.over(self._channel.unary_stream)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Complete a text or its token ids."""
        return self.submit(draft_of_prompt(prompt, options), timeout=timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Answer a conversation of `{"role": ..., "content": ...}` messages."""
        return self.submit(draft_of_chat(messages, options), timeout=timeout)

    def submit(self, draft: RequestDraft, *, timeout: float | None = None) -> AsyncGeneration:
        """Send a request as it is."""
        call = self._generate(
            draft_to_wire(draft), timeout=self._timeout if timeout is None else timeout
        )
        return AsyncGeneration(call, draft.request_id, self.address)

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The token ids that `generate` would give the engine for `text`."""
        return await self._ask(calls.tokenize(text, model, add_special_tokens))

    async def tokenize_chat(
        self, messages: Sequence[Mapping[str, str]], *, model: str = ""
    ) -> tuple[int, ...]:
        """The token ids that `chat` would give the engine for `messages`."""
        return await self._ask(calls.tokenize_chat(messages, model))

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
            response: ResponseT = await send(call.request, timeout=self._timeout)
        except grpc.RpcError as failure:
            raise to_error(failure, self.address) from failure
        return call.read(response)

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
