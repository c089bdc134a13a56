"""The HTTP port: its socket, and an HTTP server that starts with the first connection.

Importing server.py takes 0.1 s, with uvicorn and all dialects. So servers that are only used over
gRPC never import it, and the import does not delay the opening of engines.
"""

import asyncio
import importlib
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trtc.protos.errors import RequestError
from trtc.runtime.frontends.base import Frontend, is_loopback
from trtc.runtime.frontends.http.listener import BoundedListener
from trtc.runtime.service.service import Service
from trtc.runtime.wire.tls import ServerTls

if TYPE_CHECKING:
    from trtc.runtime.frontends.http.server import HttpServer


@dataclass(frozen=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    tls: ServerTls | None = None
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers in a browser; `*`: all."""
    has_page: bool = True
    """Whether `/` is the web page."""

    def frontend(self, service: Service) -> "HttpFrontend":
        return HttpFrontend(self, service)


class HttpFrontend(Frontend):
    """All dialects of HTTP, metrics, probes and the page."""

    name: ClassVar[str] = "http"

    def __init__(self, config: HttpConfig, service: Service) -> None:
        super().__init__(config.host)
        self._config = config
        self._service = service
        self._listener: BoundedListener | None = None
        """None: not started, or the server owns it."""
        self._server: asyncio.Task[HttpServer] | None = None
        """None: there has been no connection yet."""

    async def start(self) -> None:
        tls = None if self._config.tls is None else self._config.tls.context()
        self._listener = _listen(self.host, self._config.port)
        self.port = int(self._listener.getsockname()[1])
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._first_connection, self._listener, tls)

    def drain(self) -> None:
        """Nothing to do: probes keep answering, and the service refuses requests."""

    async def close(self, grace_s: float) -> None:
        """Close idle connections at once, and others after their answers, at most `grace_s`."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        if self._server is not None:
            server = await self._server
            await server.close(grace_s)

    def _first_connection(self, listener: BoundedListener, tls: ssl.SSLContext | None) -> None:
        asyncio.get_running_loop().remove_reader(listener)
        self._listener = None
        self._server = asyncio.create_task(self._serve(listener, tls))

    async def _serve(self, listener: BoundedListener, tls: ssl.SSLContext | None) -> "HttpServer":
        await asyncio.to_thread(importlib.import_module, "trtc.runtime.frontends.http.server")
        from trtc.runtime.frontends.http.server import HttpServer

        return await HttpServer.accepting(
            listener,
            tls,
            self._service,
            is_local=is_loopback(self.host),
            cors_origins=self._config.cors_origins,
            has_page=self._config.has_page,
        )


def _listen(host: str, port: int) -> BoundedListener:
    try:
        return BoundedListener.listen_on(host, port)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {host}:{port} ({error.strerror})",
            field="--http-port",
            remedy="Choose another port or host, or 0 for any free port",
        ) from error
