"""The principal of a gRPC call, and the interceptor that refuses calls without one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc_health.v1 import health

from trtc.protos.errors import UnauthenticatedError
from trtc.runtime.frontends.grpc.resets import Resets
from trtc.runtime.requests.principal import Principal, Scope, host_of
from trtc.runtime.service.access import Access, Peer, api_key
from trtc.runtime.wire.failures import to_status

OPEN_SERVICES = (health.SERVICE_NAME,)
"""Probes need no credentials."""
_SUBJECT_PROPERTIES = ("x509_subject", "x509_subject_alternative_name", "x509_common_name")
"""gRPC sets these for verified client certificates only; the first that is not empty names the
tenant."""

Metadata = Iterable[tuple[str, str | bytes]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Find = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


def caller(
    context: "grpc.aio.ServicerContext[Any, Any]", access: Access, scope: Scope = Scope.INFERENCE
) -> Principal:
    """The principal of a call.

    Raises:
        UnauthenticatedError: a credential is missing or unknown.
        ForbiddenError: the caller has not the scope.
    """
    return access.admit(_peer_of(context), scope)


def stranger(context: "grpc.aio.ServicerContext[Any, Any]", access: Access) -> Principal:
    """The principal of a call that needs no credentials."""
    return access.stranger(_peer_of(context))


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # a class at run time
    """Refuses calls without a valid key before their request is read. If a host has many refused
    calls, they are refused late (`resets`): they occupy its streams, and cost the server little.

    Args:
        is_probe: whether a path is a probe, in addition to those of OPEN_SERVICES.
    """

    def __init__(self, access: Access, is_probe: Callable[[str], bool]) -> None:
        self._access = access
        self._is_probe = is_probe
        self._refused = Resets()

    def drain(self) -> None:
        """Refuse calls at once from now on."""
        self._refused.close()

    async def intercept_service(
        self,
        continuation: Find,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        path = handler_call_details.method
        service = path.rpartition("/")[0].removeprefix("/")
        if service not in OPEN_SERVICES and not self._is_probe(path):
            try:
                self._access.holder(_key_of(handler_call_details.invocation_metadata or ()))
            except UnauthenticatedError as error:
                return self._refusing(to_status(error))
        return await continuation(handler_call_details)

    def _refusing(self, status: grpc.Status) -> Handler:
        """A streaming handler that refuses the call: of such calls gRPC reads no request before the
        handler does."""

        async def refuse(requests: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            host = host_of(_ip_of(context.peer()))
            try:
                await self._refused.hold(host)
            except asyncio.CancelledError:
                await self._refused.hold(host)
                raise
            await context.abort(status.code, status.details, status.trailing_metadata)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _peer_of(context: "grpc.aio.ServicerContext[Any, Any]") -> Peer:
    peer = context.peer()
    key = _key_of(context.invocation_metadata() or ())
    return Peer(peer, _ip_of(peer), _subject(context.auth_context()), key)


def _ip_of(peer: str) -> str:
    """`192.0.2.1` of `ipv4:192.0.2.1:50000`, `2001:db8::1` of `ipv6:%5B2001:db8::1%5D:50000`."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def _key_of(metadata: Metadata) -> str:
    """The API key in metadata, whose names gRPC gives in lower case. Of several the last counts."""
    said = {name: value for name, value in metadata if isinstance(value, str)}
    return api_key(said.get("authorization", ""), said.get("x-api-key", ""))


def _subject(properties: Mapping[str, Iterable[bytes]]) -> str:
    """The name of the client's certificate, which may have no subject, as SPIFFE's have none."""
    for name in _SUBJECT_PROPERTIES:
        if said := b"\0".join(properties.get(name, ())):
            return said.decode(errors="backslashreplace")
    return ""
