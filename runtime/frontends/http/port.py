"""The HTTP port: /metrics for Prometheus, /healthz (the process lives), /readyz (it serves).

uvicorn runs in a thread of its own with its own event loop, so that the port answers while the gRPC
loop is busy. Connections are bounded in number and in time (`http_connections`).
"""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Future
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trtc.protos.errors import RequestError

if TYPE_CHECKING:
    import uvicorn

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Any]], Send], Any]

CLOSE_S = 1
"""How long answers under way get when the server closes."""
BACKLOG = 128
"""Connections that the kernel completes before they are accepted."""


class HttpServer:
    """Answers on `host:port` until closed.

    Args:
        why_not_ready: engine name -> reason, empty when ready; called from the HTTP thread.

    Raises:
        RequestError: the port cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], dict[str, str]],
    ) -> None:
        self._socket = _listen(host, port)
        self._port = int(self._socket.getsockname()[1])
        self._application = _application(registry, why_not_ready)
        self._server: Future[uvicorn.Server] = Future()
        self._thread = threading.Thread(target=self._run, name="trtc-http")
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound port."""
        return self._port

    def close(self) -> None:
        """Stop listening; answers under way get CLOSE_S seconds, idle connections none."""
        self._server.result().should_exit = True
        self._thread.join()

    def _run(self) -> None:
        # uvicorn takes 50 ms to import: here they overlap with the opening of engines.
        try:
            self._server.set_result(_uvicorn(self._application))
        except BaseException as error:
            self._server.set_exception(error)
            raise
        asyncio.run(self._serve(self._server.result()))

    async def _serve(self, server: "uvicorn.Server") -> None:
        await server.serve(sockets=[self._socket])
        for connection in server.server_state.connections.copy():
            connection.transport.abort()
        await asyncio.sleep(0)  # for the aborted transports to close their sockets


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. `create_server` sets SO_REUSEADDR and leaves SO_REUSEPORT unset, so a
    port never has two servers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {host}:{port} ({error.strerror})",
            field="--http-port",
            remedy="Choose another port or host, or 0 for any free port",
        ) from error


def _uvicorn(application: Application) -> "uvicorn.Server":
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

    async def application(
        scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Send
    ) -> None:
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


def _json(status: HTTPStatus, document: dict[str, object]) -> tuple[HTTPStatus, str, bytes]:
    return status, "application/json", json.dumps(document).encode() + b"\n"
