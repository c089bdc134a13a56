"""Errors in OpenAI's shape: {"error": {message, type, param, code}}, with a status."""

from collections.abc import Mapping

import msgspec

from trtc.protos import errors
from trtc.runtime.frontends.asgi import MethodError, PathError
from trtc.runtime.frontends.http.exchange import BodySizeError, BodyTypeError, Exchange
from trtc.runtime.frontends.http.failures import Kind, refusal_headers

_INTERNAL = Kind(500, "server_error", "internal_error")
_KINDS: Mapping[type[errors.TrtcError], Kind] = {
    errors.UserError: Kind(400, "invalid_request_error"),
    errors.EngineError: _INTERNAL,
    errors.EnvironmentFault: _INTERNAL,
    errors.InvalidRequestError: Kind(400, "invalid_request_error"),
    PathError: Kind(404, "invalid_request_error", "unknown_url"),
    MethodError: Kind(405, "invalid_request_error", "method_not_supported"),
    errors.ContextLengthError: Kind(400, "invalid_request_error", "context_length_exceeded"),
    BodySizeError: Kind(413, "invalid_request_error", "body_too_large"),
    BodyTypeError: Kind(415, "invalid_request_error", "unsupported_media_type"),
    errors.UnauthenticatedError: Kind(401, "invalid_request_error", "invalid_api_key"),
    errors.ForbiddenError: Kind(403, "permission_error", "permission_denied"),
    errors.QueueFullError: Kind(429, "rate_limit_error", "rate_limit_exceeded", retries=True),
    errors.DeadlineError: Kind(504, "server_error", "deadline_exceeded"),
    errors.CancelledError: Kind(499, "invalid_request_error", "cancelled"),
    errors.NoTokenizerError: Kind(400, "invalid_request_error", "no_tokenizer"),
    errors.UnknownModelError: Kind(404, "invalid_request_error", "model_not_found"),
    errors.UnavailableError: Kind(503, "server_error", "service_unavailable", retries=True),
}


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Failure(msgspec.Struct):
    error: Error


def failure(error: errors.TrtcError) -> Failure:
    """The error response."""
    kind = errors.by_class(_KINDS, error, _INTERNAL)
    param = error.field.partition(" ")[0]  # "stop" of "stop (how many)"
    return Failure(Error(str(error), kind.type, param or None, kind.code))


async def refuse(exchange: Exchange, error: errors.TrtcError) -> None:
    """Answer with an error."""
    kind = errors.by_class(_KINDS, error, _INTERNAL)
    headers = refusal_headers(kind, error)
    await exchange.answer(kind.status, msgspec.json.encode(failure(error)), headers=headers)
