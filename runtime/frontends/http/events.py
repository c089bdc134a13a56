"""Server-sent events of streamed answers."""

import msgspec

from trtc.runtime.frontends.http.exchange import EVENT_STREAM, Exchange, Headers

_ENCODER = msgspec.json.Encoder()


async def begin_events(exchange: Exchange, headers: Headers = ()) -> None:
    """Send the response headers of a stream of events."""
    headers = ((b"cache-control", b"no-cache"), *headers)
    await exchange.begin(200, content_type=EVENT_STREAM, headers=headers)


def event(document: object, name: str = "") -> bytes:
    """The bytes of one event; the name is for clients that dispatch on it."""
    data = b"data: " + _ENCODER.encode(document) + b"\n\n"
    return b"event: %s\n%s" % (name.encode(), data) if name else data
