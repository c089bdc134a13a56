"""What every HTTP port needs before its own application: who calls, or a refusal.

    connection ─ TLS ─► scope["extensions"]["tls"] ─► admitting ─► scope["state"]["principal"]

ASGI's TLS extension has the client certificate's name; here it is added to uvicorn's protocols,
which leave it out.
"""

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
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.access import Access, Peer, api_key

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[AsgiScope, Receive, Send], Awaitable[None]]

_STATUS: dict[type[TrtcError], HTTPStatus] = {
    UserError: HTTPStatus.BAD_REQUEST,
    EngineError: HTTPStatus.SERVICE_UNAVAILABLE,
    EnvironmentFault: HTTPStatus.SERVICE_UNAVAILABLE,
    InvalidRequestError: HTTPStatus.BAD_REQUEST,
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
"""As RFC 4514 and OpenSSL abbreviate; other names stay."""


def http_status(error: TrtcError) -> HTTPStatus:
    """The status of an error; INTERNAL_SERVER_ERROR for what has none of its own."""
    return by_class(_STATUS, error, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_headers(error: TrtcError) -> list[tuple[bytes, bytes]]:
    """The headers that HTTP wants beside the status of an error."""
    if isinstance(error, UnauthenticatedError):
        return [(b"www-authenticate", b"Bearer")]
    return []


def admitting(
    application: Application,
    access: Access,
    *,
    scope_of: Callable[[str], Scope | None],
    refuse: Callable[[TrtcError], tuple[str, bytes]],
) -> Application:
    """An application that finds its caller in `scope["state"]["principal"]`.

    Args:
        scope_of: what a path is for; None: anybody may ask, and there is no principal.
        refuse: content type and body of an error, in the words of the protocol.
    """

    async def admitted(scope: AsgiScope, receive: Receive, send: Send) -> None:
        wanted = scope_of(scope["path"]) if scope["type"] == "http" else None
        if wanted is None:
            await application(scope, receive, send)
            return
        try:
            principal = access.admit(peer_of(scope), wanted)
        except TrtcError as error:
            await _respond(send, error, refuse)
            return
        scope.setdefault("state", {})["principal"] = principal
        await application(scope, receive, send)

    return admitted


async def _respond(
    send: Send, error: TrtcError, refuse: Callable[[TrtcError], tuple[str, bytes]]
) -> None:
    content_type, body = refuse(error)
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *error_headers(error),
    ]
    status = int(http_status(error))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def peer_of(scope: AsgiScope) -> Peer:
    """Who sent an ASGI request."""
    ip, port = scope.get("client") or ("unknown", 0)
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    key = api_key(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
    subject = scope.get("extensions", {}).get("tls", {}).get("client_cert_name") or ""
    return Peer(f"http {ip} {port}", ip, subject, key)


def with_certificate(application: Application, transport: BaseTransport) -> Application:
    """The application for one connection, with the TLS extension where the client has shown a
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
    """Of a verified client certificate, as gRPC names it: the subject as in RFC 4514, or all
    alternative names of a certificate without one."""
    certificate: Any = connection.getpeercert() or {}
    subject = ",".join(
        "+".join(f"{_SHORT_NAMES.get(name, name)}={_escape(value)}" for name, value in part)
        for part in reversed(certificate.get("subject", ()))
    )
    others: Iterable[tuple[str, str]] = certificate.get("subjectAltName", ())
    return subject or "\0".join(value for _, value in others)


def _escape(value: str) -> str:
    """As OpenSSL prints values: special characters escaped, others than ASCII byte by byte."""
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
