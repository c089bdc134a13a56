"""Cross-origin requests (CORS): the web pages that may read the port's answers in a browser.

A browser sends a page's origin with its request, sends a preflight request (OPTIONS) before one
with a key or JSON, and gives the page the answer only if the answer names its origin. Without
`--cors-origin` no answer does. Only routes for clients of a model are opened: not metrics, and not
loading or unloading of models. The server uses no cookies, and allows no credentials.

Source: the Fetch standard, https://fetch.spec.whatwg.org/#http-cors-protocol.
"""

import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from trtc.runtime.frontends.asgi import Application, AsgiScope, Receive, Send
from trtc.runtime.frontends.http.exchange import Headers

ANY = "*"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9, -]{0,1024}")
_METHODS = b"GET, POST, DELETE"
_TOLD = b"x-request-id, request-id, x-trtc-ignored, retry-after"
"""Response headers that a page may read, besides the safelisted ones."""
_MAX_AGE_S = b"600"


class Cors:
    """ASGI middleware that answers preflight requests and adds CORS headers.

    Args:
        application: answers all other requests.
        origins: allowed origins; ANY for all.
        is_open: whether pages may use the route of a path.
    """

    def __init__(
        self, application: Application, origins: Sequence[str], is_open: Callable[[str], bool]
    ) -> None:
        self._application = application
        self._origins = frozenset(one.encode() for one in origins)
        self._is_open = is_open

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"")
        if not self._lets_in(origin) or not self._is_open(scope["path"]):
            await self._application(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _answer_preflight(origin, headers, send)
            return
        await self._application(scope, receive, _naming(origin, send))

    def _lets_in(self, origin: bytes) -> bool:
        return bool(origin) and (origin in self._origins or ANY.encode() in self._origins)


def _naming(origin: bytes, send: Send) -> Send:
    """A `send` that adds the origin to the response headers."""
    more: Headers = (*_named(origin), (b"access-control-expose-headers", _TOLD))

    async def named(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return named


async def _answer_preflight(origin: bytes, headers: dict[bytes, bytes], send: Send) -> None:
    wanted = headers.get(b"access-control-request-headers", b"")
    answer: Headers = (
        *_named(origin),
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", _MAX_AGE_S),
        (b"content-length", b"0"),
    )
    if wanted and _HEADER_NAMES.fullmatch(wanted):
        answer = (*answer, (b"access-control-allow-headers", wanted))
    await send({"type": "http.response.start", "status": 204, "headers": list(answer)})
    await send({"type": "http.response.body", "body": b""})


def _named(origin: bytes) -> Headers:
    return ((b"access-control-allow-origin", origin), (b"vary", b"Origin"))
