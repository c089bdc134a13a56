"""Errors over gRPC: a TrtcError is converted to a status, and back to the same TrtcError by the
client.

The status message is the error in one line, for every client. The standard
`grpc-status-details-bin` trailer has a google.rpc.ErrorInfo with its class, problem, field and
remedy, and a google.rpc.RetryInfo with the time to wait, if known.
"""

from collections.abc import Sequence
from typing import cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from trtc.protos import errors

DOMAIN = "trtc"
MAX_TEXT = 1000
"""Most characters of a message or detail; metadata has a limit of 8 KiB in total."""

_STATUS: dict[type[errors.TrtcError], grpc.StatusCode] = {
    errors.UserError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.EngineError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EnvironmentFault: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    errors.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.NoTokenizerError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownModelError: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
}

_BY_NAME: dict[str, type[errors.TrtcError]] = {
    error.__name__: error
    for error in (
        errors.RequestError,
        errors.UnsupportedError,
        errors.EngineCorruptError,
        errors.EngineIncompatibleError,
        errors.EnvironmentFault,
        errors.InvalidRequestError,
        errors.ContextLengthError,
        errors.UnauthenticatedError,
        errors.ForbiddenError,
        errors.QueueFullError,
        errors.DeadlineError,
        errors.CancelledError,
        errors.NoTokenizerError,
        errors.UnknownModelError,
        errors.UnknownRequestError,
        errors.UnavailableError,
        errors.HookError,
        errors.InvariantError,
    )
}

_BY_CODE: dict[grpc.StatusCode, type[errors.TrtcError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.ForbiddenError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFullError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.CancelledError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.NoTokenizerError,
    grpc.StatusCode.NOT_FOUND: errors.UnknownModelError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
}
"""Error class of statuses without our details, which come from gRPC itself or a proxy."""


_REFUSED_STREAM = "RST_STREAM with error code 7"
"""RFC 9113, section 7: the server has not processed the call. gRPC reports it only as text."""


def status_name(error: errors.TrtcError) -> str:
    """The name of an error's gRPC status; INTERNAL for classes without one."""
    return errors.by_class(_STATUS, error, grpc.StatusCode.INTERNAL).name


def to_status(error: errors.TrtcError) -> grpc.Status:
    """The status to abort a call with."""
    detail = Any()
    detail.Pack(
        ErrorInfo(
            reason=type(error).__name__,
            domain=DOMAIN,
            metadata={
                "problem": error.problem[:MAX_TEXT],
                "field": error.field[:MAX_TEXT],
                "remedy": error.remedy[:MAX_TEXT],
            },
        )
    )
    status = Status(
        code=Code.Value(status_name(error)),
        message=str(error)[:MAX_TEXT],
        details=[detail, *_retry_details(error)],
    )
    return rpc_status.to_status(status)


def _retry_details(error: errors.TrtcError) -> tuple[Any, ...]:
    if not isinstance(error, errors.QueueFullError) or error.retry_after_s is None:
        return ()
    info, detail = RetryInfo(), Any()
    info.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
    detail.Pack(info)
    return (detail,)


def to_error(failure: grpc.RpcError, address: str) -> errors.TrtcError:
    """The error of a failed call; `address`: the server's, for messages about the connection."""
    assert isinstance(failure, grpc.Call | grpc.aio.AioRpcError)
    details = _details(failure)
    info = _error_info(details)
    if info is not None and info.reason in _BY_NAME:
        said = info.metadata
        error = _BY_NAME[info.reason](said["problem"], field=said["field"], remedy=said["remedy"])
        if isinstance(error, errors.QueueFullError):
            error.retry_after_s = _retry_after_s(details)
        return error
    kind = _BY_CODE.get(failure.code(), errors.ServeError)
    said_by_grpc = " ".join((failure.details() or failure.code().name).split())
    if kind is errors.UnavailableError and _REFUSED_STREAM in said_by_grpc:
        return errors.QueueFullError(
            "the connection has as many open calls as the server allows",
            field=address,
            remedy="Use several clients, or serve with a larger --max-connection-streams",
        )
    if kind is errors.UnavailableError:
        return kind(
            f"cannot reach the server ({said_by_grpc})",
            field=address,
            remedy="Check that `trtc serve` runs there and that host and port are right",
        )
    return kind(said_by_grpc)


def _details(failure: grpc.Call | grpc.aio.AioRpcError) -> Sequence[Any]:
    try:
        # asyncio's errors have the methods of grpc.Call, but not its class.
        status = rpc_status.from_call(cast(grpc.Call, failure))
    except ValueError:  # a proxy rewrote the code or the message: the details no longer apply
        return ()
    return status.details if status is not None else ()


def _error_info(details: Sequence[Any]) -> ErrorInfo | None:
    info = ErrorInfo()
    for detail in details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _retry_after_s(details: Sequence[Any]) -> float | None:
    info = RetryInfo()
    for detail in details:
        if detail.Unpack(info):
            return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None
