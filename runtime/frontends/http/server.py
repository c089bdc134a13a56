"""Accepts connections of the HTTP port: uvicorn's protocol in the server's loop, and the dialects.

    connection (connections) -> request (exchange) -> route (application) -> dialect -> service

uvicorn parses HTTP (with httptools) and speaks ASGI; its server, which handles signals and
processes, is left out. The port imports this module with its first connection (port.py).
"""

import asyncio
import ssl
import time
from collections.abc import Sequence
from functools import partial

from uvicorn.config import Config
from uvicorn.server import ServerState

from trtc.runtime.frontends.http.anthropic.dialect import anthropic
from trtc.runtime.frontends.http.application import RESERVED_CONNECTIONS, Application
from trtc.runtime.frontends.http.connections import BoundedConnection
from trtc.runtime.frontends.http.cors import Cors
from trtc.runtime.frontends.http.kserve.dialect import kserve
from trtc.runtime.frontends.http.listener import BACKLOG, BoundedListener
from trtc.runtime.frontends.http.ollama.dialect import ollama
from trtc.runtime.frontends.http.openai.dialect import openai
from trtc.runtime.frontends.http.page.dialect import page
from trtc.runtime.frontends.http.probes import probes
from trtc.runtime.frontends.http.routes import Dialect
from trtc.runtime.frontends.http.sleep import sleep
from trtc.runtime.frontends.http.tgi.dialect import tgi
from trtc.runtime.service.service import Service

HANDSHAKE_S = 5.0
"""Seconds for the TLS handshake of a connection."""
ACCEPTED_S = 1.0
"""Seconds for connections that are being accepted when the server closes; they take some iterations
of its event loop."""
DIALECTS: Sequence[Dialect] = (probes, openai, anthropic, kserve, ollama, tgi, sleep)
"""Dialects, whose paths are disjoint."""


class HttpServer:
    """Serves the connections of one listener."""

    def __init__(
        self, server: asyncio.Server, listener: BoundedListener, state: ServerState
    ) -> None:
        self._server = server
        self._listener = listener
        self._state = state

    @classmethod
    async def accepting(
        cls,
        listener: BoundedListener,
        tls: ssl.SSLContext | None,
        service: Service,
        *,
        is_local: bool,
        cors_origins: Sequence[str],
        has_page: bool,
    ) -> "HttpServer":
        """A server that accepts the listener's connections, from the first on."""
        max_connections = service.limits.max_connections + RESERVED_CONNECTIONS
        dialects = (*DIALECTS, page) if has_page else DIALECTS
        routes = [route for dialect in dialects for route in dialect(service)]
        application = Application(
            routes,
            service.access,
            max_connections,
            is_local=is_local,
            is_draining=lambda: service.models.is_draining,
        )
        config = Config(
            Cors(application, cors_origins, application.is_for_clients)
            if cors_origins
            else application,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="critical",  # a malformed request is not worth a line
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        config.load()
        state = ServerState()
        connection = partial(
            BoundedConnection,
            config,
            state,
            max_connections=max_connections,
            established=listener.established,
        )
        server = await asyncio.get_running_loop().create_server(
            connection,
            sock=listener,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
            backlog=BACKLOG,
        )
        return cls(server, listener, state)

    async def close(self, grace_s: float) -> None:
        """Close idle connections at once, and others after their answers, at most `grace_s`."""
        await self._close_accepted()
        self._server.close()
        for connection in self._state.connections.copy():
            connection.shutdown()
        tasks = self._state.tasks
        if tasks:
            await asyncio.wait(tasks.copy(), timeout=grace_s)
        for connection in self._state.connections.copy():
            connection.transport.abort()
        for task in tasks.copy():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _close_accepted(self) -> None:
        """Close accepted connections that have no transport yet: asyncio drops them when a server
        closes, and leaves their sockets open."""
        deadline = time.monotonic() + ACCEPTED_S
        while self._listener.num_accepted and time.monotonic() < deadline:
            self._listener.shut_down_accepted()
            await asyncio.sleep(0)
