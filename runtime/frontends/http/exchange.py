"""One HTTP request and its response, for handlers that do not use ASGI."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.asgi import AsgiScope, Receive, Send, peer_of
from trtc.runtime.requests.call import REQUEST_ID, Call, call_of
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.intake import Intake

Headers = Sequence[tuple[bytes, bytes]]

CALL_HEADERS = (REQUEST_ID.encode(), b"traceparent", b"tracestate")
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
MAX_DISCARDED_BYTES = 64 << 20
"""Bytes of a too large body that are read before the error is sent, because many clients read a
response only after they have sent the whole body."""

MAX_QUERY_BYTES = 4096

NOBODY = Principal("nobody", "nobody", is_anonymous=True)

T = TypeVar("T")


class BodyTypeError(InvalidRequestError):
    """The Content-Type of the body is not JSON."""


class BodySizeError(InvalidRequestError):
    """The body is too large."""


class Exchange:
    """A request and its response. Used in the task of its handler only."""

    def __init__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.peer = peer_of(scope)
        self.principal = NOBODY
        """The principal of `peer`, once it is identified."""
        self.is_begun = False
        """Whether the response headers were sent."""
        self.has_left = False
        """Whether the client disconnected before the response was complete."""
        self._query: bytes = scope.get("query_string", b"")
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._is_ended = False
        self._watcher: asyncio.Task[None] | None = None

    @cached_property
    def number(self) -> str:
        """Random id of the request, 32 hexadecimal digits, for dialects whose errors have an id."""
        return uuid.uuid4().hex

    @cached_property
    def call(self) -> Call:
        """The call, with the client's id or else the exchange's number."""
        request_id, *trace = (self.header(name).decode("latin-1") for name in CALL_HEADERS)
        return call_of(request_id, *trace, drawn=self.number)

    def header(self, name: bytes) -> bytes:
        """The value of a header, by its lower-case name; b"" if there is none."""
        return self._headers.get(name, b"")

    def query(self, *names: str) -> Mapping[str, str]:
        """The fields of the query string.

        Args:
            names: names of the allowed fields.

        Raises:
            InvalidRequestError: a field is unknown, or is given twice.
        """
        fields: dict[str, str] = {}
        given = self._query[:MAX_QUERY_BYTES].decode("latin-1")
        for name, value in parse_qsl(given, keep_blank_values=True):
            if name not in names or name in fields:
                raise InvalidRequestError(
                    "is given twice" if name in fields else "is not known",
                    field=name[:100],
                    remedy=f"Fields of the query are: {', '.join(names)}",
                )
            fields[name] = value
        return fields

    @asynccontextmanager
    async def document(
        self,
        intake: Intake,
        max_bytes: int,
        parse: Callable[[bytes], T],
        *,
        any_type: bool = False,
    ) -> AsyncIterator[T]:
        """The result of `parse` for the request's JSON body. Leave the context as soon as the
        request is admitted. From here on the handler is cancelled if its client disconnects.

        Args:
            any_type: accept other content types too, unless a browser sends the request.

        Raises:
            BodyTypeError, BodySizeError: the body is not JSON, or has more than `max_bytes`.
        """
        # Browsers send the Origin of a page that posts to another origin.
        self._check_type(any_type=any_type and not self.header(b"origin"))

        async def read() -> bytes:
            return await self._body(max_bytes)

        async with intake.request(self.principal, read, parse) as parsed:
            yield parsed

    async def answer(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send a complete response."""
        length = (b"content-length", b"%d" % len(body))
        await self.begin(status, content_type=content_type, headers=(length, *headers))
        await self.end(body)

    async def begin(self, status: int, *, content_type: bytes, headers: Headers = ()) -> None:
        """Send the headers of a streamed response."""
        self.is_begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": int(status),
                "headers": [(b"content-type", content_type), *self._named(headers)],
            }
        )

    async def write(self, data: bytes) -> None:
        """Send a chunk of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last chunk of the body."""
        self._is_ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """The handler has ended."""
        if self._watcher is not None:
            self._watcher.cancel()

    def _named(self, headers: Headers) -> Headers:
        """The headers with the id of the call: the client's, or the dialect's."""
        name = REQUEST_ID.encode()
        if not self.call.is_named and any(one == name for one, _ in headers):
            return headers
        return [*(one for one in headers if one[0] != name), (name, self.call.id.encode())]

    def _check_type(self, *, any_type: bool) -> None:
        """Check the content type: pages of other origins can make a browser post here (CSRF), but
        not with the type of JSON."""
        given = self.header(b"content-type").partition(b";")[0].strip().lower()
        if given != JSON and not any_type:
            raise BodyTypeError(
                f"is {given[:80].decode(errors='replace')!r}" if given else "is missing",
                field="Content-Type",
                remedy="Send JSON, with the header Content-Type: application/json",
            )
        if self.header(b"content-encoding") not in (b"", b"identity"):
            raise BodyTypeError(
                "compressed bodies are not taken", field="Content-Encoding", remedy="Leave it out"
            )

    async def _body(self, max_bytes: int) -> bytes:
        announced = self.header(b"content-length")
        body = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.has_left = True
                raise asyncio.CancelledError
            body += message["body"]
            more = message["more_body"]
            size = int(announced) if announced.isdigit() else len(body)
            if size > max_bytes:
                await self._discard(more=more)
                raise BodySizeError(
                    f"has {size} bytes" if announced else f"has more than {max_bytes} bytes",
                    field="body",
                    remedy=f"The server takes at most {max_bytes}: see --max-request-bytes",
                )
        self._watcher = asyncio.create_task(self._watch(asyncio.current_task()))
        return bytes(body)

    async def _discard(self, *, more: bool) -> None:
        num_discarded = 0
        while more and num_discarded < MAX_DISCARDED_BYTES:
            message = await self._receive()
            more = message.get("more_body", False)
            num_discarded += len(message.get("body", b""))

    async def _watch(self, handler: "asyncio.Task[Any] | None") -> None:
        """Cancel the handler when its client disconnects."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_ended and handler is not None:
            self.has_left = True
            handler.cancel()
