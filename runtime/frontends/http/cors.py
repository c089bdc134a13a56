"""Cross-origin requests (CORS): which pages of the web a browser lets read what the port answers.

A browser sends a page's origin with its request, asks before (by OPTIONS) whether a request with a
key or with JSON may be sent at all, and gives the page the answer only if the answer names its
origin. Without `--cors-origin` no answer does. Only routes that clients of a model need are opened:
never metrics, and never those by which models come and go. Nothing here uses cookies, and none are
let in.

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
"""Headers of answers that a page may read, beside those that all may."""
_MAX_AGE_S = b"600"


class Cors:
    """An application, and what browsers want to know of its answers.

    Args:
        application: answers everything else.
        origins: those of the pages; ANY for all.
        is_open: whether the route of a path is for pages.
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
    """`send`, with an answer's head that names the origin."""
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
