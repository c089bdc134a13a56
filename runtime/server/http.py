"""The HTTP port: /metrics for Prometheus, /healthz (the process lives), /readyz (it serves).

It answers from a thread of its own, so that it still answers while the gRPC loop is busy.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trtc.protos.errors import RequestError

_log = logging.getLogger("trtc.server")

SLOW_CLIENT_S = 5
"""A client that takes longer than this to send or take anything is dropped."""


class HttpServer:
    """Answers on `host:port` until closed.

    Args:
        why_not_ready: engine name -> reason, empty when ready; called from other threads.

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
        handler = _handler(registry, why_not_ready)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), handler)
        except OSError as error:
            raise RequestError(
                f"cannot listen on {host}:{port} ({error.strerror})",
                field="--http-port",
                remedy="Choose another port or host, or 0 for any free port",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="trtc-http", kwargs={"poll_interval": 0.1}
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening and wait for the answers under way."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    # Otherwise a second server could take the port of one that is closing, or share it.
    allow_reuse_port = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A prober that hangs up early is no news; the default would print a traceback."""
        _log.debug("http client went away: %s", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(
    registry: CollectorRegistry, why_not_ready: Callable[[], dict[str, str]]
) -> type[BaseHTTPRequestHandler]:
    """A handler class bound to what it shows: http.server makes one instance a request."""

    class Handler(BaseHTTPRequestHandler):
        timeout = SLOW_CLIENT_S
        server_version = "trtc"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._send(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                self._send_json(HTTPStatus.OK, {"status": "alive"})
            elif path == "/readyz":
                reasons = why_not_ready()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
                self._send_json(
                    status, {"status": "not ready" if reasons else "ready", "reasons": reasons}
                )
            else:
                known = ["/metrics", "/healthz", "/readyz"]
                self._send_json(HTTPStatus.NOT_FOUND, {"status": "no such path", "known": known})

        do_HEAD = do_GET

        def _send_json(self, status: HTTPStatus, document: dict[str, object]) -> None:
            self._send(status, "application/json", json.dumps(document).encode() + b"\n")

        def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes and scrapes come every few seconds and say nothing new."""

    return Handler
