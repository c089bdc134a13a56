"""One request over HTTP and its answer, for handlers that know nothing of ASGI."""

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
"""Of a body that is too large: so much is read before the error is sent, as many clients
read a response only once they have sent everything."""

MAX_QUERY_BYTES = 4096

NOBODY = Principal("nobody", "nobody", is_anonymous=True)

T = TypeVar("T")


class BodyTypeError(InvalidRequestError):
    """The body is said to be no JSON."""


class BodySizeError(InvalidRequestError):
    """The body is too large."""


class Exchange:
    """A request, and how it is answered. Used in the task of its handler only."""

    def __init__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.peer = peer_of(scope)
        self.principal = NOBODY
        """Who `peer` is, once that is known."""
        self.is_begun = False
        """Whether a status was sent."""
        self.has_left = False
        """Whether the client has gone before its answer was whole."""
        self._query: bytes = scope.get("query_string", b"")
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._is_ended = False
        self._watcher: asyncio.Task[None] | None = None

    @cached_property
    def number(self) -> str:
        """Names the request, for dialects whose errors too have an id: 32 hexadecimal digits."""
        return uuid.uuid4().hex

    @cached_property
    def call(self) -> Call:
        """The call, as the client names it; or else by the exchange's number."""
        request_id, *trace = (self.header(name).decode("latin-1") for name in CALL_HEADERS)
        return call_of(request_id, *trace, drawn=self.number)

    def header(self, name: bytes) -> bytes:
        """The value of a header, by its name in lower case; empty when there is none."""
        return self._headers.get(name, b"")

    def query(self, *names: str) -> Mapping[str, str]:
        """The fields of the query string.

        Args:
            names: of those that there are.

        Raises:
            InvalidRequestError: another one, or one that is given twice.
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
        """What `parse` makes of the request's JSON. Leave the context as soon as what it asks for
        is admitted. From here on the handler is cancelled when its client leaves.

        Args:
            any_type: take what is not called JSON too, unless a browser sends it.

        Raises:
            BodyTypeError, BodySizeError: the body is no JSON, or has more than `max_bytes`.
        """
        # Browsers say where a page came from when it posts to another place.
        self._check_type(any_type=any_type and not self.header(b"origin"))

        async def read() -> bytes:
            return await self._body(max_bytes)

        async with intake.request(self.principal, read, parse) as parsed:
            yield parsed

    async def answer(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """The whole answer."""
        length = (b"content-length", b"%d" % len(body))
        await self.begin(status, content_type=content_type, headers=(length, *headers))
        await self.end(body)

    async def begin(self, status: int, *, content_type: bytes, headers: Headers = ()) -> None:
        """The head of an answer that comes in pieces."""
        self.is_begun = True
        await self._send(
            {
                "type": "http.response.start",
                "status": int(status),
                "headers": [(b"content-type", content_type), *self._named(headers)],
            }
        )

    async def write(self, data: bytes) -> None:
        """A piece of it; waits while the client takes nothing."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last piece."""
        self._is_ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """The handler has ended."""
        if self._watcher is not None:
            self._watcher.cancel()

    def _named(self, headers: Headers) -> Headers:
        """With the id of the call: the client's, or else that which the dialect gave it."""
        name = REQUEST_ID.encode()
        if not self.call.is_named and any(one == name for one, _ in headers):
            return headers
        return [*(one for one in headers if one[0] != name), (name, self.call.id.encode())]

    def _check_type(self, *, any_type: bool) -> None:
        """Pages of other origins can send a browser's user's requests here, but not as JSON."""
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
        """Cancel the handler when its client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_ended and handler is not None:
            self.has_left = True
            handler.cancel()
