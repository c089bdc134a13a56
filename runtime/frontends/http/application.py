"""The ASGI application of the HTTP port: routing, cancellation on disconnect, error responses."""

import asyncio
import itertools
import logging
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from trtc.protos.errors import ForbiddenError, InvariantError, TrtcError
from trtc.runtime.frontends.asgi import AsgiScope, MethodError, PathError, Receive, Send
from trtc.runtime.frontends.base import is_loopback
from trtc.runtime.frontends.http.exchange import Exchange
from trtc.runtime.frontends.http.plain import answer_plainly, refuse_plainly
from trtc.runtime.frontends.http.routes import Route
from trtc.runtime.requests.call import answering
from trtc.runtime.requests.principal import Scope
from trtc.runtime.scheduling.shares import Resource, Shares
from trtc.runtime.service.access import Access

_log = logging.getLogger("trtc.server")

_INTERNAL = InvariantError("internal error", remedy="Look into the server's log")
_PORT = re.compile(r":\d+$")
MAX_NAMED_PATH = 200
"""Characters of an unknown path in its error."""
RESERVED_CONNECTIONS = 64
"""Connections reserved for probes: so many fewer other requests are answered at once."""


class Application:
    """Answers the requests of all connections, in one asyncio loop.

    Args:
        routes: routes of all dialects; routes of one path have different methods.
        access: identifies callers.
        is_local: whether only this machine reaches the port; then Host headers with other names are
            refused (DNS rebinding).
        max_connections: connections of the port, the reserved ones included.
        is_draining: returns whether the server refuses new requests.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        access: Access,
        max_connections: int,
        *,
        is_local: bool,
        is_draining: Callable[[], bool],
    ) -> None:
        self._access = access
        self._is_local = is_local
        self._is_draining = is_draining
        self._all = routes
        self._routes = _by_path(routes)
        self._places = Shares(
            Resource(
                "http_connections",
                max_connections - RESERVED_CONNECTIONS,
                "HTTP requests that are answered",
                "--max-connections",
            )
        )

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, self._closing(send))
        try:
            with answering(exchange.call):
                await self._answer(exchange)
        except asyncio.CancelledError:
            if not exchange.has_left:
                raise
        finally:
            exchange.close()

    def is_for_clients(self, path: str) -> bool:
        """Whether a path's route is for inference, or open to all callers."""
        scopes = {route.scope for route in self._routes_of(path).values()}
        return bool(scopes) and scopes <= {None, Scope.INFERENCE}

    def _closing(self, send: Send) -> Send:
        """A `send` that closes the connection after the answer while the server drains, so that the
        client's next request goes to another server."""

        async def send_or_close(message: MutableMapping[str, Any]) -> None:
            if self._is_draining() and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        return send_or_close

    async def _answer(self, exchange: Exchange) -> None:
        routes = self._routes_of(exchange.path)
        if exchange.method in routes:
            await self._run(exchange, routes[exchange.method])
            return
        near = list(routes.values()) or self._nearest(exchange.path)
        refuse = near[0].refuse if near else refuse_plainly
        try:
            self._access.identify(exchange.peer)  # unknown callers do not learn which paths exist
            if near:
                raise _misdirected(exchange, routes, near)
        except TrtcError as error:
            await refuse(exchange, error)
        else:
            known: dict[str, object] = {"status": "no such path", "known": list(self._routes)}
            await answer_plainly(exchange, HTTPStatus.NOT_FOUND, known)

    def _nearest(self, path: str) -> Sequence[Route]:
        """The routes that have most of a path's first segments, at least one: those of the protocol
        that its client speaks."""
        begins = [(_num_common(path, one.path), one) for one in self._all if one.path != "/"]
        most = max((number for number, _ in begins), default=0)
        return [one for number, one in begins if number == most] if most else []

    async def _run(self, exchange: Exchange, route: Route) -> None:
        handler = route.handlers["GET" if exchange.method == "HEAD" else exchange.method]
        try:
            self._check_host(exchange)
            if route.scope is not None:
                exchange.principal = self._access.admit(exchange.peer, route.scope)
            if route.is_probe:
                await handler(exchange)
                return
            place = self._places.take(exchange.principal)
            try:
                await handler(exchange)
            finally:
                place.free()
        except TrtcError as error:
            await self._refuse(exchange, route, error)
        except Exception:  # noqa: BLE001 (one request's, not the server's)
            _log.exception("internal error path=%s", route.path)
            await self._refuse(exchange, route, _INTERNAL)

    def _check_host(self, exchange: Exchange) -> None:
        """Refuse other host names on a local port (DNS rebinding): a web page can have its own name
        resolved to 127.0.0.1, and its browser then lets it read the answers of this server. Callers
        with an API key are allowed."""
        host = exchange.header(b"host").decode("latin-1").lower()
        is_own = not host or is_loopback(_PORT.sub("", host))
        if self._is_local and not is_own and not self._access.needs_keys:
            raise ForbiddenError(
                f"is {host[:100]!r}, and this server is for clients of its own machine",
                field="Host",
                remedy="Ask for localhost or 127.0.0.1, or start the server with --api-keys",
            )

    async def _refuse(self, exchange: Exchange, route: Route, error: TrtcError) -> None:
        if exchange.is_begun:
            # The answer has begun: the client detects the error by its missing end.
            raise error
        await route.refuse(exchange, error)

    def _routes_of(self, path: str) -> Mapping[str, Route]:
        """Routes of a path by method; empty: there is no such path."""
        found = self._routes.get(path)
        if found is not None and (path == "/" or not path.endswith("/")):
            return found
        roots = (one for one in self._routes if one.endswith("/") and one != "/")
        above = (one for one in roots if path.startswith(one))
        nearest = max(above, key=len, default=path)
        return {} if nearest == path else self._routes[nearest]


def _by_path(routes: Sequence[Route]) -> dict[str, dict[str, Route]]:
    """Path -> method -> route."""
    found: dict[str, dict[str, Route]] = {}
    for route in routes:
        methods = found.setdefault(route.path, {})
        assert not methods.keys() & route.handlers.keys(), f"two routes of {route.path}"
        methods.update(dict.fromkeys(route.handlers, route))
        if "GET" in route.handlers:
            methods["HEAD"] = route  # the server leaves the body out
    return found


def _num_common(one: str, other: str) -> int:
    """How many segments two paths have in common at their beginning."""
    pairs = zip(one.split("/")[1:], other.split("/")[1:], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _misdirected(
    exchange: Exchange, routes: Mapping[str, Route], near: Sequence[Route]
) -> TrtcError:
    """The error of a request that no route answers.

    Args:
        routes: those of its path, by method.
        near: the ones to ask instead.
    """
    asked = f"{exchange.method[:20]} {exchange.path[:MAX_NAMED_PATH]}"
    if routes:
        return MethodError(
            f"{asked}: the path has another method",
            remedy=f"Send {' or '.join(routes)}",
            allowed=routes,
        )
    paths = ", ".join(one.path for one in near)
    return PathError(f"{asked}: there is no such path", remedy=f"Ask for one of {paths}")
