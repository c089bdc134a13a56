"""Entries of a dialect's table of errors, and the headers of error responses."""

from dataclasses import dataclass

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.asgi import error_headers
from trtc.runtime.frontends.http.exchange import Headers

RETRY_AFTER_S = 1
"""Retry-After of a full server, which may have room again at any time."""


@dataclass(frozen=True)
class Kind:
    """Status and type of an error class in a dialect."""

    status: int
    type: str
    code: str | None = None
    retries: bool = False
    """Whether the same request may succeed later."""


def refusal_headers(kind: Kind, error: TrtcError) -> Headers:
    """Headers of an error response."""
    headers: Headers = error_headers(error)
    if kind.retries and not headers:
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    if kind.status == 503:
        headers = (
            *headers,
            (b"connection", b"close"),
        )  # so that the next request may go to another server
    return headers
