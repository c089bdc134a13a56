"""Connections of the HTTP port, with limits of their number, their time and the size of headers.

    waiting --first byte--> head --> answering --last byte--> waiting
    IDLE_S                  HEAD_S   the application's; STALLED_CLIENT_S for the client to read

uvicorn limits the time between two requests, but not a request that arrives byte by byte, the size
of its headers, a client that does not read its answer, or the number of connections. Here a
connection beyond the limit replaces the one that has waited longest. A connection that is being
answered is never replaced, and the application answers fewer requests than there may be connections
(`application.py`), so slow clients cannot block health checks.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trtc.runtime.frontends.asgi import with_certificate

IDLE_S = 65.0
"""Seconds from the accept, or from the last response, to the first byte of the next request. Longer
than clients keep idle connections in their pools, so that the clients close them."""
HEAD_S = 5.0
"""Seconds from a request's first byte to the end of its headers, and for closing a connection."""
STALLED_CLIENT_S = 60.0
"""Seconds after which the connection of a client that reads nothing of its answer is closed."""
MAX_HEAD_BYTES = 16 << 10
"""Most bytes of the request line and headers."""


class BoundedConnection(HttpToolsProtocol):
    """One connection. `server_state.connections` holds all of them, each a BoundedConnection.

    Args:
        max_connections: connections of the port.
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
        """End of the last exchange, in seconds of the event loop's clock."""
        self._max_connections = max_connections
        self._established = established
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = False

    @property
    def is_answering(self) -> bool:
        """Whether the application is handling a request of this connection."""
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
            raise ValueError("the head is too large")  # answered with 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._close_within(None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if self.transport.is_closing() or (self.cycle.more_body and not self.pipeline):
            self.transport.close()  # the rest of the request is not needed
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
        """Close at once; drops unsent data."""
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        self.waiting_since = self.loop.time()
        self._close_within(IDLE_S)

    def _close_within(self, seconds: float | None) -> None:
        """Close the connection after `seconds`; None: cancel that."""
        self._deadline = self._again(self._deadline, seconds)

    def _take_within(self, seconds: float | None) -> None:
        """Abort if the client does not read within `seconds`; None: cancel that."""
        self._stalled = self._again(self._stalled, seconds)

    def _again(
        self, timer: asyncio.TimerHandle | None, seconds: float | None
    ) -> asyncio.TimerHandle | None:
        if timer is not None:
            timer.cancel()
        return None if seconds is None else self.loop.call_later(seconds, self.abort)
