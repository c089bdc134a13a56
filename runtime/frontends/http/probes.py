"""/metrics for Prometheus, and the probes /healthz (liveness) and /readyz (readiness)."""

import asyncio
import json
from collections.abc import Callable, Sequence
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from trtc.runtime.frontends.http.exchange import JSON, Exchange
from trtc.runtime.frontends.http.plain import refuse_plainly
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.exposition import Exposition
from trtc.runtime.service.service import Service

Page = Callable[[], tuple[HTTPStatus, bytes, bytes]]
"""Status, content type, body."""


def probes(service: Service) -> Sequence[Route]:
    """The routes of metrics and probes."""

    exposition = Exposition(service.metrics)

    def metrics() -> tuple[HTTPStatus, bytes, bytes]:
        return HTTPStatus.OK, CONTENT_TYPE_LATEST.encode(), exposition.text()

    def readyz() -> tuple[HTTPStatus, bytes, bytes]:
        reasons = service.why_not_ready()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _json(status, {"status": "not ready" if reasons else "ready", "reasons": reasons})

    return (
        _probe("/metrics", metrics, Scope.METRICS, in_thread=True),
        _probe("/healthz", lambda: _json(HTTPStatus.OK, {"status": "alive"})),
        _probe("/readyz", readyz),
    )


def _probe(path: str, page: Page, scope: Scope | None = None, *, in_thread: bool = False) -> Route:
    """
    Args:
        in_thread: whether to run the page in a thread, because it takes milliseconds, in which the
            event loop must deliver tokens. Others do not depend on a free thread.
    """

    async def answer(exchange: Exchange) -> None:
        status, content_type, body = await asyncio.to_thread(page) if in_thread else page()
        await exchange.answer(status, body, content_type=content_type)

    return Route(path, {"GET": answer}, refuse_plainly, scope, is_probe=True)


def _json(status: HTTPStatus, document: dict[str, object]) -> tuple[HTTPStatus, bytes, bytes]:
    return status, JSON, json.dumps(document).encode() + b"\n"
