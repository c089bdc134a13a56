"""Errors in Anthropic's shape: {"type": "error", "error": {type, message}, "request_id"}."""

from collections.abc import Mapping

import msgspec

from trtc.protos import errors
from trtc.runtime.frontends.asgi import MethodError, PathError
from trtc.runtime.frontends.http.exchange import BodySizeError, BodyTypeError, Exchange, Headers
from trtc.runtime.frontends.http.failures import Kind, refusal_headers

_INTERNAL = Kind(500, "api_error")
_KINDS: Mapping[type[errors.TrtcError], Kind] = {
    errors.UserError: Kind(400, "invalid_request_error"),
    errors.EngineError: _INTERNAL,
    errors.EnvironmentFault: _INTERNAL,
    errors.InvalidRequestError: Kind(400, "invalid_request_error"),
    PathError: Kind(404, "not_found_error"),
    MethodError: Kind(405, "invalid_request_error"),
    BodySizeError: Kind(413, "request_too_large"),
    BodyTypeError: Kind(415, "invalid_request_error"),
    errors.UnauthenticatedError: Kind(401, "authentication_error"),
    errors.ForbiddenError: Kind(403, "permission_error"),
    errors.QueueFullError: Kind(429, "rate_limit_error", retries=True),
    errors.DeadlineError: Kind(504, "timeout_error"),
    errors.CancelledError: Kind(499, "api_error"),
    errors.NoTokenizerError: Kind(400, "invalid_request_error"),
    errors.UnknownModelError: Kind(404, "not_found_error"),
    # Anthropic's own status is 529, which load balancers do not know.
    errors.UnavailableError: Kind(503, "overloaded_error", retries=True),
}


def request_id(exchange: Exchange) -> str:
    """Id of the request in answers, errors and the audit log."""
    return f"req_{exchange.number}"


def id_headers(exchange: Exchange) -> Headers:
    return ((b"request-id", request_id(exchange).encode()),)


def failure(exchange: Exchange, error: errors.TrtcError) -> dict[str, object]:
    """The error response."""
    kind = errors.by_class(_KINDS, error, _INTERNAL)
    said = {"type": kind.type, "message": str(error)}
    return {"type": "error", "error": said, "request_id": request_id(exchange)}


async def refuse(exchange: Exchange, error: errors.TrtcError) -> None:
    """Answer with an error."""
    kind = errors.by_class(_KINDS, error, _INTERNAL)
    headers = (*id_headers(exchange), *refusal_headers(kind, error))
    body = msgspec.json.encode(failure(exchange, error))
    await exchange.answer(kind.status, body, headers=headers)
