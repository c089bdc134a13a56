"""What a dialect's table of errors says of each, and the headers that go with a refusal."""

from dataclasses import dataclass

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.asgi import error_headers
from trtc.runtime.frontends.http.exchange import Headers

RETRY_AFTER_S = 1
"""For clients of a server that is full: it may have room again at any time."""


@dataclass(frozen=True)
class Kind:
    """What an error of a class is called."""

    status: int
    type: str
    code: str | None = None
    retries: bool = False
    """Whether the same request may succeed later."""


def refusal_headers(kind: Kind, error: TrtcError) -> Headers:
    """Of an answer that is an error."""
    headers: Headers = error_headers(error)
    if kind.retries and not headers:
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),)
    if kind.status == 503:
        headers = (*headers, (b"connection", b"close"))  # another server may have the next
    return headers
