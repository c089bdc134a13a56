"""The contract of a dialect of the HTTP port: a list of routes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.http.exchange import Exchange
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.service import Service

Handler = Callable[[Exchange], Awaitable[None]]
Refusal = Callable[[Exchange, TrtcError], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    """The handlers of one path."""

    path: str
    """A path that ends in `/` matches all paths below it that have no route of their own; `/` alone
    matches only itself."""
    handlers: Mapping[str, Handler]
    """Handlers by method; that of GET answers HEAD too."""
    refuse: Refusal
    """Sends the error response if a handler raises before its response has begun."""
    scope: Scope | None = Scope.INFERENCE
    """Scope that a caller needs; None: public."""
    is_probe: bool = False
    """Whether it answers at once, also if all other connections are in use."""


Dialect = Callable[[Service], Sequence[Route]]
"""A protocol over HTTP: makes its routes for a service. Dialects are independent of each other."""
