"""The HTTP port: /metrics for Prometheus, /healthz (the process lives), /readyz (it serves).

uvicorn runs in a thread of its own with its own event loop, so that the port answers while the gRPC
loop is busy. Connections are bounded in number and in time (`listener`, `connections`).
"""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trtc.protos.errors import RequestError, TrtcError
from trtc.runtime.frontends.asgi import (
    Application,
    AsgiScope,
    Receive,
    Send,
    admitting,
    http_status,
)
from trtc.runtime.frontends.base import Frontend
from trtc.runtime.frontends.http.listener import BACKLOG, BoundedListener
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.service import Service
from trtc.runtime.wire.tls import ServerTls

if TYPE_CHECKING:
    import uvicorn

CLOSE_S = 1
"""How long answers under way get when the server closes."""
OPEN_PATHS = ("/healthz", "/readyz")
"""Probes need no credentials."""
HANDSHAKE_S = 5.0
"""For the TLS handshake of a connection."""


@dataclass(frozen=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    tls: ServerTls | None = None

    def frontend(self, service: Service) -> "HttpFrontend":
        return HttpFrontend(self, service)


class HttpFrontend(Frontend):
    """Metrics and probes. It takes no drafts, and reads readiness whenever it is asked."""

    name: ClassVar[str] = "http"

    def __init__(self, config: HttpConfig, service: Service) -> None:
        super().__init__(config.host)
        self._config = config
        # Both may be read in the HTTP thread.
        self._application = admitting(
            _application(service.metrics.registry, service.why_not_ready),
            service.access,
            scope_of=lambda path: None if path in OPEN_PATHS else Scope.METRICS,
            refuse=_refusal,
        )
        self._server: Future[uvicorn.Server] = Future()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        tls = None if self._config.tls is None else self._config.tls.context()
        listener = _listen(self.host, self._config.port)
        self.port = int(listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, args=(listener, tls), name="trtc-http")
        self._thread.start()

    def drain(self) -> None:
        """Probes answer until the end."""

    async def close(self, grace_s: float) -> None:
        """Answers under way get CLOSE_S seconds at most, idle connections none."""
        if self._thread is not None:
            await asyncio.to_thread(self._stop, self._thread)

    def _stop(self, thread: threading.Thread) -> None:
        self._server.result().should_exit = True
        thread.join()

    def _run(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        # uvicorn takes 50 ms to import: here they overlap with the opening of engines.
        try:
            self._server.set_result(_uvicorn(self._application, tls))
        except BaseException as error:
            self._server.set_exception(error)
            raise
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(self._serve(self._server.result(), listener))

    async def _serve(self, server: "uvicorn.Server", listener: socket.socket) -> None:
        await server.serve(sockets=[listener])
        for connection in server.server_state.connections.copy():
            connection.transport.abort()
        await asyncio.sleep(0)  # for the aborted transports to close their sockets


class _Loop(asyncio.SelectorEventLoop):
    """Of servers whose TLS handshakes end in time; uvicorn leaves them asyncio's 60 seconds."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        if kwargs.get("ssl") is not None:
            kwargs.setdefault("ssl_handshake_timeout", HANDSHAKE_S)
        return await super().create_server(*args, **kwargs)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return BoundedListener.listen_on(host, port)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {host}:{port} ({error.strerror})",
            field="--http-port",
            remedy="Choose another port or host, or 0 for any free port",
        ) from error


def _uvicorn(application: Application, tls: ssl.SSLContext | None) -> "uvicorn.Server":
    import uvicorn

    from trtc.runtime.frontends.http.connections import BoundedConnection

    return uvicorn.Server(
        uvicorn.Config(
            application,
            http=BoundedConnection,
            loop="asyncio",
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="error",  # a malformed request is not worth a line
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )


def _application(
    registry: CollectorRegistry, why_not_ready: Callable[[], dict[str, str]]
) -> Application:
    """The ASGI application: a table of paths."""

    def readyz() -> tuple[HTTPStatus, str, bytes]:
        reasons = why_not_ready()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json(status, {"status": "not ready" if reasons else "ready", "reasons": reasons})

    pages: Mapping[str, Callable[[], tuple[HTTPStatus, str, bytes]]] = {
        "/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)),
        "/healthz": lambda: _json(HTTPStatus.OK, {"status": "alive"}),
        "/readyz": readyz,
    }

    async def application(scope: AsgiScope, receive: Receive, send: Send) -> None:
        page = pages.get(scope["path"])
        if scope["method"] not in ("GET", "HEAD"):
            status, content_type, body = _json(
                HTTPStatus.METHOD_NOT_ALLOWED, {"status": "only GET and HEAD"}
            )
        elif page is None:
            status, content_type, body = _json(
                HTTPStatus.NOT_FOUND, {"status": "no such path", "known": list(pages)}
            )
        else:
            status, content_type, body = page()
        headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return application


def _refusal(error: TrtcError) -> tuple[str, bytes]:
    _, content_type, body = _json(http_status(error), {"status": str(error)})
    return content_type, body


def _json(status: HTTPStatus, document: dict[str, object]) -> tuple[HTTPStatus, str, bytes]:
    return status, "application/json", json.dumps(document).encode() + b"\n"
