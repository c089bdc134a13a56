"""Connections of the HTTP port, bounded in number, in time and in what their heads hold.

    waiting --first byte--> head --> answering --last byte--> waiting
    IDLE_S                  HEAD_S   the application's; STALLED_CLIENT_S to take what is sent

uvicorn bounds the time between two requests, but neither a request that comes byte by byte, nor the
size of its head, nor a client that takes no answer, nor how many connections there are. Here one
beyond the limit takes the place of the one that has waited longest. A connection that is answered
is never replaced, and the application answers fewer than there may be connections
(`application.py`): slow clients can never keep a health check out.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trtc.runtime.frontends.asgi import with_certificate

IDLE_S = 65.0
"""From the accept, or from the last response, to the first byte of the next request. Longer than
clients keep idle connections in their pools, so that it is they who close them."""
HEAD_S = 5.0
"""From a request's first byte to the end of its headers, and for a connection to end."""
STALLED_CLIENT_S = 60.0
"""A client that takes nothing of an answer for this long loses its connection."""
MAX_HEAD_BYTES = 16 << 10
"""Of the first line and the headers of a request."""


class BoundedConnection(HttpToolsProtocol):
    """One connection. `server_state.connections` holds all of them; each is one of ours.

    Args:
        max_connections: of the port.
        established: called with the file descriptor of each established connection.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        *,
        max_connections: int,
        established: Callable[[int], None],
    ) -> None:
        super().__init__(config, server_state, {})
        self.waiting_since = 0.0
        """When the last exchange ended, in seconds of the event loop's clock."""
        self._max_connections = max_connections
        self._established = established
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = False

    @property
    def is_answering(self) -> bool:
        """Whether the application has a request of this connection."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = with_certificate(self.app, transport)
        self._established(transport.get_extra_info("socket").fileno())
        self._wait()
        connections: set[Any] = self.connections
        if len(connections) > self._max_connections:
            waiting = [one for one in connections if not one.is_answering]
            min(waiting, key=lambda one: one.waiting_since).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_within(None)
        self._take_within(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if not self.is_answering:
            self._close_within(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4  # and `: `, and the end of the line
        if self._head_bytes + len(self.url) > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # which is answered with 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._close_within(None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if self.transport.is_closing() or (self.cycle.more_body and not self.pipeline):
            self.transport.close()  # what else comes of the request is not wanted
            self._close_within(HEAD_S)
            return
        if not self.pipeline:
            self._wait()
        super().on_response_complete()
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._close_within(HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_within(STALLED_CLIENT_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_within(None)

    def abort(self) -> None:
        """Close at once; what was not sent yet is lost."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.waiting_since = self.loop.time()
        self._close_within(IDLE_S)

    def _close_within(self, seconds: float | None) -> None:
        """Set the time that the connection has; None: as long as it takes."""
        self._deadline = self._again(self._deadline, seconds)

    def _take_within(self, seconds: float | None) -> None:
        """The same of the client, to take what was written."""
        self._stalled = self._again(self._stalled, seconds)

    def _again(
        self, timer: asyncio.TimerHandle | None, seconds: float | None
    ) -> asyncio.TimerHandle | None:
        if timer is not None:
            timer.cancel()
        return None if seconds is None else self.loop.call_later(seconds, self.abort)
