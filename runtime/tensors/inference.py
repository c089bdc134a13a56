"""Runs requests of tensors by the service: inference of KServe's protocol over gRPC and HTTP.

    tensors -> InferRequest: RowRequests -> Service.generate for each row -> Exchange: messages

A request's rows are admitted together or not at all. Ids are chosen by clients and need not be
unique: a stop request ends all requests of its id and client.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec.structs import replace as with_fields

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.validation import MAX_REQUEST_ID_CHARACTERS
from trtc.runtime.service.service import Service
from trtc.runtime.service.streams import OutputStream
from trtc.runtime.tensors.codec import check_outputs
from trtc.runtime.tensors.model import check_version
from trtc.runtime.tensors.replies import Message, Prompt, RowReplies
from trtc.runtime.tensors.requests import RequestReader, RowRequest, Tensors, asks_to_stop

Parameters = Mapping[str, Any]
MICROSECONDS = 1_000_000
_NAMES = {"model": "model_name", "request_id": "id"}
"""Field of a draft -> that of an inference request."""
_KNOWN_PARAMETERS = ("timeout", "triton_enable_empty_final_response", "binary_data_output")


@dataclass(frozen=True)
class InferRequest:
    """One request, read; not yet submitted."""

    model: str
    request_id: str
    """The client's id; may be empty, and need not be unique."""
    rows: tuple[RowRequest, ...]
    outputs: frozenset[str]
    """Names of the requested outputs; empty: all."""
    timeout_s: float | None = None
    stops: bool = False
    """Whether it is a stop request, which ends the running requests of its id and has no rows."""
    version: str = "1"
    """Version of the model; once the request runs, that of its engine."""

    def check_one_reply(self) -> None:
        """Raises InvalidRequestError unless the answer is a single message."""
        problem = ""
        if len(self.rows) > 1:
            problem = f"has {len(self.rows)} rows"
        elif self.rows and self.rows[0].request_input.n > 1:
            problem = f"asks for {self.rows[0].request_input.n} sequences"
        elif self.rows and self.rows[0].stream:
            problem = "asks for a message each step"
        if problem:
            raise InvalidRequestError(
                f"{problem}, which one reply cannot hold",
                field="inputs",
                remedy="Stream the replies (ModelStreamInfer, generate_stream), or ask for one",
            )


class Reply(NamedTuple):
    message: Message
    final: bool
    """Whether it is the request's last message."""


class _RunningRow(NamedTuple):
    row: RowRequest
    replies: RowReplies
    stream: OutputStream


class Exchange:
    """A running request; call either `replies` or `reply`, once."""

    def __init__(self, request: InferRequest, rows: Sequence[_RunningRow]) -> None:
        self.request = request
        self._rows = rows

    @property
    def streams(self) -> tuple[OutputStream, ...]:
        return tuple(one.stream for one in self._rows)

    def stop(self) -> None:
        for one in self._rows:
            one.stream.abort()

    async def replies(self) -> AsyncGenerator[list[Reply], None]:
        """Yields replies as they become available; close it, or run it to its end.

        Raises:
            TrtcError: the error of the first row that fails.
        """
        if not self._rows:
            yield [Reply({}, final=True)]
        unfinished = len(self._rows)
        async with aclosing(_outputs(self._rows)) as arriving:
            async for row, outputs in arriving:
                unfinished -= outputs[-1].usage is not None
                messages = [self._asked_for(one) for one in row.replies.messages(outputs)]
                if not unfinished:
                    messages = messages or [{}]
                last = len(messages) - 1
                if messages:
                    yield [
                        Reply(message, final=not unfinished and at == last)
                        for at, message in enumerate(messages)
                    ]

    async def reply(self) -> Message:
        """The only message of a request with one message (`InferRequest.check_one_reply`)."""
        async with aclosing(self.replies()) as replies:
            return [one.message async for several in replies for one in several][-1]

    def _asked_for(self, message: Message) -> Message:
        asked = self.request.outputs
        return {name: array for name, array in message.items() if not asked or name in asked}


class Inference:
    """Reads and runs requests of tensors. For the service's asyncio loop; `read` is thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[tuple[str, str], set[Exchange]] = {}
        """(principal's name, id) -> running requests; no empty sets."""

    def read(
        self,
        model: str,
        version: str,
        request_id: str,
        tensors: Tensors,
        outputs: Sequence[str],
        parameters: Parameters,
    ) -> InferRequest:
        """Parse a request from tensors, whose names, types and shapes have been checked.

        Raises:
            TrtcError: there is no such model, or a field is invalid; names it.
        """
        with fields_as_sent(_NAMES):
            handle = self._service.engine(model)
        check_version(handle, version)
        if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
            raise InvalidRequestError(
                f"has {len(request_id)} characters",
                field="id",
                remedy=f"Give at most {MAX_REQUEST_ID_CHARACTERS}",
            )
        asked, timeout_s = check_outputs(outputs), _timeout(parameters)
        if asks_to_stop(tensors):
            if not request_id:
                raise InvalidRequestError(
                    "is empty", field="id", remedy="Send that of the request to stop"
                )
            return InferRequest(
                handle.name, request_id, (), asked, timeout_s, stops=True, version=handle.version
            )
        limit = handle.manifest.limits.max_batch_size
        for name, array in tensors.items():
            if not 1 <= len(array) <= limit:
                raise InvalidRequestError(
                    f"has {len(array)} rows", field=name, remedy=f"Send 1 to {limit}"
                )
        reader = RequestReader.of(handle, exclude_input_in_output=True)
        rows = [
            replace(row, request_input=with_fields(row.request_input, model=handle.name))
            for row in reader.read(tensors)
        ]
        return InferRequest(
            handle.name, request_id, tuple(rows), asked, timeout_s, version=handle.version
        )

    @asynccontextmanager
    async def run(
        self, request: InferRequest, principal: Principal, deadline: float | None
    ) -> AsyncIterator[Exchange]:
        """Run a request; leaving the context early ends it within a step.

        Args:
            deadline: time.monotonic() after which it ends; its own timeout may be earlier.

        Raises:
            TrtcError: a row is not admitted.
        """
        if request.timeout_s is not None:
            own = time.monotonic() + request.timeout_s
            deadline = own if deadline is None else min(deadline, own)
        key = (principal.name, request.request_id)
        if request.stops:
            for exchange in self._running.get(key, ()):
                exchange.stop()
            yield Exchange(request, ())
            return
        async with AsyncExitStack() as streams:
            with fields_as_sent(_NAMES):
                engine = streams.enter_context(self._service.models.lease(request.model))
            rows = [
                await self._admit(row, at, request, engine, principal, deadline, streams)
                for at, row in enumerate(request.rows)
            ]
            exchange = Exchange(replace(request, version=engine.version), rows)
            self._running.setdefault(key, set()).add(exchange)
            try:
                yield exchange
            finally:
                self._running[key].discard(exchange)
                if not self._running[key]:
                    del self._running[key]

    async def _admit(
        self,
        row: RowRequest,
        at: int,
        request: InferRequest,
        engine: EngineHandle,
        principal: Principal,
        deadline: float | None,
        streams: AsyncExitStack,
    ) -> _RunningRow:
        service = self._service
        with fields_as_sent({**_NAMES, **row.sent_as}):
            stream = await streams.enter_async_context(
                service.generate(
                    row.request_input, principal=principal, deadline=deadline, engine=engine
                )
            )
            text = row.request_input.text or ""
            if row.with_prompt and row.request_input.token_ids is not None:
                text = await self._text(engine, stream.prompt_ids, principal)
        replies = RowReplies(
            row,
            Prompt(stream.prompt_ids, text),
            batch_index=at if len(request.rows) > 1 else None,
            has_text=engine.tokenizer is not None,
        )
        return _RunningRow(row, replies, stream)

    async def _text(
        self, engine: EngineHandle, token_ids: Sequence[int], principal: Principal
    ) -> str:
        """Text of a prompt of token ids; "" without a tokenizer."""
        if engine.tokenizer is None:
            return ""
        return await self._service.detokenize(engine.name, token_ids, False, principal)


async def _outputs(
    rows: Sequence[_RunningRow],
) -> AsyncGenerator[tuple[_RunningRow, list[Output]], None]:
    """Outputs of all rows as they arrive; the first error ends all rows."""
    if len(rows) == 1:
        while (outputs := await _next(rows[0])) is not None:
            yield rows[0], outputs
        return
    reading = {asyncio.create_task(_next(row)): row for row in rows}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                row = reading.pop(task)
                if (outputs := task.result()) is not None:
                    reading[asyncio.create_task(_next(row))] = row
                    yield row, outputs
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _next(row: _RunningRow) -> list[Output] | None:
    """The row's outputs since the last call; None: it has ended."""
    with fields_as_sent({**_NAMES, **row.row.sent_as}):
        return await anext(row.stream, None)


def _timeout(parameters: Parameters) -> float | None:
    """The timeout in seconds of a request's parameters; None: there is none.

    Raises:
        InvalidRequestError: a parameter is unknown or not supported.
    """
    for name in parameters:
        if name not in _KNOWN_PARAMETERS:
            raise InvalidRequestError(
                "is not supported",
                field=f"parameters.{name[:100]}",
                remedy=f"Send some of: {', '.join(_KNOWN_PARAMETERS)}; what to generate is said "
                "by inputs",
            )
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 0:
        raise InvalidRequestError(
            f"is {str(timeout)[:100]}", field="parameters.timeout", remedy="Send microseconds"
        )
    return timeout / MICROSECONDS if timeout else None
