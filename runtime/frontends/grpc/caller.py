"""The principal behind a gRPC call: the subject of its client certificate, else its connection."""

import ipaddress
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import grpc.aio

from trtc.runtime.requests.principal import Principal, connection, tenant

IPV6_HOST_BITS = 64
"""Of an IPv6 address: one host may use any address of its network."""
_SUBJECT_PROPERTIES = ("x509_subject", "x509_subject_alternative_name", "x509_common_name")
"""gRPC sets these for verified client certificates only; the first that is set names the tenant."""


def caller(context: "grpc.aio.ServicerContext[Any, Any]") -> Principal:
    """Who makes the call."""
    properties = context.auth_context()
    for name in _SUBJECT_PROPERTIES:
        if values := properties.get(name):
            return tenant(b"\0".join(values).decode(errors="backslashreplace"))
    return _connection(context.peer())


@lru_cache(maxsize=4096)
def _connection(peer: str) -> Principal:
    return connection(peer, _host(peer))


def _host(peer: str) -> str:
    """`192.0.2.1` of `ipv4:192.0.2.1:50000`, the network of `ipv6:[2001:db8::1]:50000`."""
    kind, _, address = unquote(peer).partition(":")
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind not in ("ipv4", "ipv6"):
        return kind
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_HOST_BITS), strict=False))
    return str(parsed)
