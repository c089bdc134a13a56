"""Errors in TGI's shape: {"error": ..., "error_type": ...}, with a status."""

from collections.abc import Mapping

import msgspec

from trtc.protos import errors
from trtc.runtime.frontends.asgi import MethodError, PathError
from trtc.runtime.frontends.http.exchange import BodySizeError, BodyTypeError, Exchange
from trtc.runtime.frontends.http.failures import Kind, refusal_headers

_GENERATION = Kind(500, "generation")
_KINDS: Mapping[type[errors.TrtcError], Kind] = {
    errors.UserError: Kind(422, "validation"),
    errors.InvalidRequestError: Kind(422, "validation"),
    PathError: Kind(404, "validation"),
    MethodError: Kind(405, "validation"),
    BodySizeError: Kind(413, "validation"),
    BodyTypeError: Kind(415, "validation"),
    errors.UnauthenticatedError: Kind(401, "validation"),
    errors.ForbiddenError: Kind(403, "validation"),
    errors.QueueFullError: Kind(429, "overloaded", retries=True),
    errors.DeadlineError: Kind(504, "incomplete_generation"),
    errors.CancelledError: Kind(499, "incomplete_generation"),
    errors.NoTokenizerError: Kind(422, "validation"),
    errors.UnknownModelError: Kind(404, "validation"),
    errors.UnavailableError: Kind(503, "overloaded", retries=True),
}


class Failure(msgspec.Struct):
    error: str
    error_type: str


def failure(error: errors.TrtcError) -> Failure:
    """The error response."""
    return Failure(str(error), errors.by_class(_KINDS, error, _GENERATION).type)


async def refuse(exchange: Exchange, error: errors.TrtcError) -> None:
    """Answer with an error."""
    kind = errors.by_class(_KINDS, error, _GENERATION)
    body = msgspec.json.encode(failure(error))
    await exchange.answer(kind.status, body, headers=refusal_headers(kind, error))
