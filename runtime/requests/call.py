"""The call behind a request, as its client names it: for logs and traces, never for decisions.

A frontend says whose call it answers; whatever runs in the call's task may ask.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

REQUEST_ID = "x-request-id"
"""Header and metadata by which clients name a call, and which return its name."""
_ID = re.compile(r"[A-Za-z0-9._:/=+@-]{1,128}")
_MAX_TRACE = 512
"""Characters of a trace header; the W3C's `tracestate` may have as many."""


@dataclass(frozen=True)
class Call:
    """One call of a client."""

    id: str
    """As the client gave it, or drawn."""
    is_named: bool = False
    """Whether the client gave it."""
    traceparent: str = ""
    """W3C trace context, as it came; "": there was none."""
    tracestate: str = ""


NO_CALL = Call("")
_CURRENT: ContextVar[Call] = ContextVar("trtc_call", default=NO_CALL)


def call_of(
    request_id: str, traceparent: str = "", tracestate: str = "", *, drawn: str = ""
) -> Call:
    """The call that came with these headers; an id that is no short word is not taken.

    Args:
        drawn: its id if the client gave none; "": a random one.
    """
    is_named = _ID.fullmatch(request_id) is not None
    return Call(
        request_id if is_named else drawn or uuid.uuid4().hex,
        is_named,
        traceparent if len(traceparent) <= _MAX_TRACE else "",
        tracestate if len(tracestate) <= _MAX_TRACE else "",
    )


@contextmanager
def answering(call: Call) -> Iterator[None]:
    """Within it, in this task and those that it starts, `current_call` is this one."""
    before = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def current_call() -> Call:
    """NO_CALL outside of one."""
    return _CURRENT.get()
