"""Connections of the HTTP port, bounded in number and in time.

uvicorn bounds the time between two requests, but neither a request that comes byte by byte, nor a
connection that sends nothing, nor how many connections there are. Here one deadline covers a whole
exchange (headers, body, response), and a connection beyond the limit takes the place of the one
that has waited longest: slow clients can never keep a health check out.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from trtc.runtime.frontends.asgi import with_certificate

EXCHANGE_S = 5.0
"""From the accept, or from the last response, to the end of the next response."""
MAX_CONNECTIONS = 64


class BoundedConnection(H11Protocol):
    """One connection. `server_state.connections` holds all of them; each is one of ours."""

    waiting_since = 0.0
    """When the current exchange began, in seconds of the event loop's clock."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = with_certificate(self.app, transport)
        self._restart_deadline()
        connections: set[Any] = self.connections
        if len(connections) > MAX_CONNECTIONS:
            min(connections, key=lambda one: one.waiting_since).abort()

    def on_response_complete(self) -> None:
        self._restart_deadline()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close at once; what was not sent yet is lost."""
        self.connections.discard(self)
        self.transport.abort()

    def _restart_deadline(self) -> None:
        self._cancel_deadline()
        self.waiting_since = self.loop.time()
        # Of a closing transport too: it waits for its client to take the response.
        self._deadline = self.loop.call_later(EXCHANGE_S, self.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
