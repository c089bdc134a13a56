"""What a dialect of the HTTP port is: a list of routes, and an error's wording for each."""

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
    """What answers one path."""

    path: str
    """Ending in `/`: the path of everything below it, except where that has a route of its own.
    `/` alone is only itself."""
    handlers: Mapping[str, Handler]
    """By method."""
    refuse: Refusal
    """Answers with an error that a handler raised before it began its answer."""
    scope: Scope | None = Scope.INFERENCE
    """What a caller needs; None: anybody may ask."""
    is_probe: bool = False
    """It answers at once, and even where all connections are taken."""


Dialect = Callable[[Service], Sequence[Route]]
"""A protocol over HTTP: its routes, in front of a service. A dialect knows no other."""
