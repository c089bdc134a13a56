"""The blocking client."""

from collections.abc import Iterator, Sequence
from typing import Protocol, Unpack, cast

import grpc

from trtc.protos.errors import UnavailableError
from trtc.runtime.client import calls
from trtc.runtime.client.base import BaseClient, RemoteGeneration
from trtc.runtime.client.calls import AnswerT, Call, closed_client
from trtc.runtime.requests.generate_options import TEMPLATE_KEYWORDS
from trtc.runtime.requests.generating import BlockingGeneration, Closing
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


class ResponseCall(Iterator[bytes], Protocol):
    """The part of a running gRPC call that is used."""

    def cancel(self) -> bool: ...


class Generation(RemoteGeneration, BlockingGeneration):
    """A running completion of a server."""

    def __init__(self, call: ResponseCall, request_id: str, address: str) -> None:
        super().__init__(request_id, address)
        self._call = call

    def __next__(self) -> Output:
        try:
            message = next(self._call)
        except StopIteration:
            self._collector.check_complete()
            raise
        except grpc.RpcError as failure:
            raise to_error(failure, self._address) from failure
        return self._take(message)

    def cancel(self) -> None:
        """End the request; further reads raise CancelledError."""
        self._call.cancel()


class Client(BaseClient[Generation], Closing):
    """A connection to `trtc serve`. Thread-safe.

    Errors are those of trtc.protos.errors, as if the engine were in this process. There are no
    retries.

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
        self._closed = False
        self._channel = (
            grpc.insecure_channel(address, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options=CLIENT_OPTIONS)
        )
        self._generate = GENERATE.over(self._channel.unary_stream)

    def submit(self, request_input: RequestInput, *, timeout: float | None = None) -> Generation:
        """Send a request."""
        request = input_to_wire(request_input)
        try:
            call = self._generate(request, timeout=self._seconds(timeout), metadata=self._metadata)
        except ValueError as failure:
            raise closed_client(self.address) from failure
        return Generation(cast(ResponseCall, call), request_input.request_id, self.address)

    def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The token ids that `generate` would use for `text`."""
        return self._ask(calls.tokenize(text, model, add_special_tokens))

    @takes(TEMPLATE_KEYWORDS)
    def tokenize_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        **options: Unpack[TemplateOptions],
    ) -> tuple[int, ...]:
        """The token ids that `chat` would use."""
        return self._ask(calls.tokenize_chat(messages, model, options))

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False
    ) -> str:
        return self._ask(calls.detokenize(token_ids, model, keep_special_tokens))

    def info(self, model: str = "") -> tuple[ModelInfo, ...]:
        """The engine called `model`, or all of them."""
        return self._ask(calls.info(model))

    def abort(self, request_id: str, *, model: str = "") -> None:
        """End a running request; its stream closes with finish reason ABORTED.

        Raises:
            UnknownRequestError: no such request is running.
        """
        self._ask(calls.abort(request_id, model))

    def _ask(self, call: Call[RequestT, ResponseT, AnswerT]) -> AnswerT:
        send = call.method.over(self._channel.unary_unary)
        try:
            reply: bytes = send(call.request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise to_error(failure, self.address) from failure
        except ValueError as failure:
            raise closed_client(self.address) from failure
        return call.answer(reply)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server accepts connections.

        Raises:
            UnavailableError: there is no connection within `timeout` seconds, or the client is
                closed.
        """
        if self._closed:
            raise closed_client(self.address)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout)
        except grpc.FutureTimeoutError as error:
            raise UnavailableError(
                f"no connection within {timeout:g} s",
                field=self.address,
                remedy="Check that `trtc serve` runs there and that host and port are right",
            ) from error

    def close(self) -> None:
        """Close the connection; running generations are cancelled."""
        self._closed = True
        self._channel.close()
