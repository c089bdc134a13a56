"""Parts that all HTTP ports share: identification of callers, and statuses of errors.

    connection ─ TLS ─► scope["extensions"]["tls"] ─► peer_of ─► Access.admit ─► principal

ASGI's TLS extension has the client certificate's name; uvicorn does not implement it, so it is
added here.
"""

import math
import ssl
from asyncio import BaseTransport
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from trtc.protos.errors import (
    CancelledError,
    DeadlineError,
    EngineError,
    EnvironmentFault,
    ForbiddenError,
    InvalidRequestError,
    NoTokenizerError,
    QueueFullError,
    TrtcError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
    UserError,
    by_class,
)
from trtc.runtime.service.access import Peer, api_key

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[AsgiScope, Receive, Send], Awaitable[None]]


class PathError(InvalidRequestError):
    """There is no such path."""


class MethodError(InvalidRequestError):
    """The path has not the request's method.

    Args:
        allowed: methods that the path has.
    """

    def __init__(self, problem: str, *, remedy: str, allowed: Iterable[str]) -> None:
        super().__init__(problem, remedy=remedy)
        self.allowed = tuple(allowed)


_STATUS: dict[type[TrtcError], HTTPStatus] = {
    UserError: HTTPStatus.BAD_REQUEST,
    EngineError: HTTPStatus.SERVICE_UNAVAILABLE,
    EnvironmentFault: HTTPStatus.SERVICE_UNAVAILABLE,
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
    PathError: HTTPStatus.NOT_FOUND,
    MethodError: HTTPStatus.METHOD_NOT_ALLOWED,
    UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    QueueFullError: HTTPStatus.TOO_MANY_REQUESTS,
    DeadlineError: HTTPStatus.GATEWAY_TIMEOUT,
    CancelledError: HTTPStatus.REQUEST_TIMEOUT,
    NoTokenizerError: HTTPStatus.BAD_REQUEST,
    UnknownModelError: HTTPStatus.NOT_FOUND,
    UnknownRequestError: HTTPStatus.NOT_FOUND,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}

_SHORT_NAMES = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "surname": "SN",
    "userId": "UID",
}
"""Attribute name -> abbreviation of RFC 4514 and OpenSSL; other names are kept."""


def http_status(error: TrtcError) -> HTTPStatus:
    """The status of an error's class; INTERNAL_SERVER_ERROR for classes without one."""
    return by_class(_STATUS, error, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_headers(error: TrtcError) -> list[tuple[bytes, bytes]]:
    """The headers that HTTP requires with the status of an error."""
    if isinstance(error, UnauthenticatedError):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, QueueFullError) and error.retry_after_s is not None:
        # Whole seconds (RFC 9110, 10.2.3), rounded up.
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    if isinstance(error, MethodError):
        return [(b"allow", ", ".join(error.allowed).encode())]
    return []


def peer_of(scope: AsgiScope) -> Peer:
    """The peer that sent an ASGI request."""
    ip, port = scope.get("client") or ("unknown", 0)
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    key = api_key(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
    subject = scope.get("extensions", {}).get("tls", {}).get("client_cert_name") or ""
    return Peer(f"http {ip} {port}", ip, subject, key)


def with_certificate(application: Application, transport: BaseTransport) -> Application:
    """The application for one connection, with the TLS extension if the client has presented a
    certificate."""
    connection = transport.get_extra_info("ssl_object")
    name = "" if connection is None else _certificate_name(connection)
    if not name:
        return application

    async def extended(scope: AsgiScope, receive: Receive, send: Send) -> None:
        scope.setdefault("extensions", {})["tls"] = {"client_cert_name": name}
        await application(scope, receive, send)

    return extended


def _certificate_name(connection: ssl.SSLObject) -> str:
    """Name of a verified client certificate, the same as gRPC's: the subject as in RFC 4514, or all
    alternative names of a certificate without a subject."""
    certificate: Any = connection.getpeercert() or {}
    subject = ",".join(
        "+".join(f"{_SHORT_NAMES.get(name, name)}={_escape(value)}" for name, value in part)
        for part in reversed(certificate.get("subject", ()))
    )
    others: Iterable[tuple[str, str]] = certificate.get("subjectAltName", ())
    return subject or "\0".join(value for _, value in others)


def _escape(value: str) -> str:
    """A value as OpenSSL prints it: special characters escaped, non-ASCII ones byte by byte."""
    escaped = "".join(
        f"\\{one}" if one in ',+"\\<>;' else one if " " <= one <= "~" else _hex_bytes(one)
        for one in value
    )
    if value.startswith(("#", " ")):
        escaped = f"\\{escaped}"
    if value.endswith(" ") and len(value) > 1:
        escaped = f"{escaped[:-1]}\\ "
    return escaped


def _hex_bytes(character: str) -> str:
    return "".join(f"\\{byte:02X}" for byte in character.encode())
