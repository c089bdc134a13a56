"""The call behind a request, as its client names it: for logs and traces, never for decisions.

A frontend sets the call that it answers; code that runs in the call's task reads it.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

REQUEST_ID = "x-request-id"
"""Header (HTTP) and metadata key (gRPC) of a call's id, in requests and responses."""
_ID = re.compile(r"[A-Za-z0-9._:/=+@-]{1,128}")
_MAX_TRACE = 512
"""Characters of a trace header; the W3C's `tracestate` may have as many."""


@dataclass(frozen=True)
class Call:
    """One call of a client."""

    id: str
    """The client's id, or a generated one."""
    is_named: bool = False
    """Whether the client gave the id."""
    traceparent: str = ""
    """W3C trace context as received; "": there was none."""
    tracestate: str = ""


NO_CALL = Call("")
_CURRENT: ContextVar[Call] = ContextVar("trtc_call", default=NO_CALL)


def call_of(
    request_id: str, traceparent: str = "", tracestate: str = "", *, drawn: str = ""
) -> Call:
    """The call of these headers. An id that is too long or has other characters is ignored.

    Args:
        drawn: id if the client gave none; "": a random one.
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
    """Context manager: in this task, and in tasks that it starts, `current_call` is `call`."""
    before = _CURRENT.set(call)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def current_call() -> Call:
    """The call being answered; NO_CALL if there is none."""
    return _CURRENT.get()
