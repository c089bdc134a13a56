"""The HTTP port of a server: its socket, and uvicorn's protocol on it in the server's loop.

    connection (connections) -> request (exchange) -> route (application) -> dialect -> service

uvicorn parses HTTP (with httptools) and speaks ASGI; its server, which handles signals and
processes, is left out.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from trtc.protos.errors import RequestError
from trtc.runtime.frontends.base import Frontend, is_loopback
from trtc.runtime.frontends.http.anthropic.dialect import anthropic
from trtc.runtime.frontends.http.application import RESERVED_CONNECTIONS, Application
from trtc.runtime.frontends.http.kserve.dialect import kserve
from trtc.runtime.frontends.http.listener import BACKLOG, BoundedListener
from trtc.runtime.frontends.http.ollama.dialect import ollama
from trtc.runtime.frontends.http.openai.dialect import openai
from trtc.runtime.frontends.http.probes import probes
from trtc.runtime.frontends.http.routes import Dialect
from trtc.runtime.frontends.http.tgi.dialect import tgi
from trtc.runtime.service.service import Service
from trtc.runtime.wire.tls import ServerTls

if TYPE_CHECKING:
    from uvicorn.server import ServerState

HANDSHAKE_S = 5.0
"""For the TLS handshake of a connection."""
DIALECTS: Sequence[Dialect] = (probes, openai, anthropic, kserve, ollama, tgi)
"""Each answers paths of its own."""


@dataclass(frozen=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    tls: ServerTls | None = None

    def frontend(self, service: Service) -> "HttpFrontend":
        return HttpFrontend(self, service)


class HttpFrontend(Frontend):
    """Every dialect of HTTP, metrics and probes."""

    name: ClassVar[str] = "http"

    def __init__(self, config: HttpConfig, service: Service) -> None:
        super().__init__(config.host)
        self._config = config
        self._max_connections = service.limits.max_connections + RESERVED_CONNECTIONS
        routes = [route for dialect in DIALECTS for route in dialect(service)]
        self._application = Application(
            routes, service.access, self._max_connections, is_local=is_loopback(config.host)
        )
        self._opening: asyncio.Task[tuple[asyncio.Server, ServerState]] | None = None

    async def start(self) -> None:
        tls = None if self._config.tls is None else self._config.tls.context()
        listener = _listen(self.host, self._config.port)
        self.port = int(listener.getsockname()[1])
        self._opening = asyncio.create_task(self._open(listener, tls))

    def drain(self) -> None:
        """Probes answer until the end, and requests are refused by the service."""

    async def close(self, grace_s: float) -> None:
        """Answers under way get `grace_s`, idle connections none."""
        if self._opening is None:
            return
        server, state = await self._opening
        server.close()
        for connection in state.connections.copy():
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks.copy(), timeout=grace_s)
        for connection in state.connections.copy():
            connection.transport.abort()
        for task in state.tasks.copy():
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        await server.wait_closed()

    async def _open(
        self, listener: BoundedListener, tls: ssl.SSLContext | None
    ) -> tuple[asyncio.Server, "ServerState"]:
        # uvicorn takes 50 ms to import: here they overlap with the opening of engines.
        await asyncio.to_thread(_import_uvicorn)
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        from trtc.runtime.frontends.http.connections import BoundedConnection

        config = Config(
            self._application,
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
            max_connections=self._max_connections,
            established=listener.established,
        )
        server = await asyncio.get_running_loop().create_server(
            connection,
            sock=listener,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
            backlog=BACKLOG,
        )
        return server, state


def _import_uvicorn() -> None:
    import uvicorn.protocols.http.httptools_impl
    import uvicorn.server  # noqa: F401


def _listen(host: str, port: int) -> BoundedListener:
    try:
        return BoundedListener.listen_on(host, port)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {host}:{port} ({error.strerror})",
            field="--http-port",
            remedy="Choose another port or host, or 0 for any free port",
        ) from error
