"""The gRPC server of a port: its services and health, and the address it listens on."""

import socket
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from trtc.protos.errors import RequestError
from trtc.runtime.frontends.base import url_host
from trtc.runtime.frontends.grpc.caller import Door
from trtc.runtime.frontends.grpc.health import Health
from trtc.runtime.frontends.grpc.lazy_service import LazyService
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.wire.channel import server_options
from trtc.runtime.wire.tls import ServerTls


def make_server(
    services: Sequence[LazyService], status: Health, limits: ServiceLimits, door: Door | None
) -> grpc.aio.Server:
    """A server with these services and health; it listens once ports are bound. `door`: the
    interceptor of all calls; None: all calls are accepted."""
    options = server_options(
        max_connection_calls=limits.max_connection_streams,
        max_connections=limits.max_connections,
        max_request_bytes=limits.max_request_bytes,
    )
    server = grpc.aio.server(options=options, interceptors=() if door is None else (door,))
    server.add_generic_rpc_handlers(tuple(services))
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    return server


def bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    """Bind `host:port`; returns the port, which the system chooses if `port` is 0.

    Raises:
        RequestError: the address is not available, or a TLS file cannot be read.
    """
    address = f"{url_host(host)}:{port}"
    try:
        _try_port(host, port)
        bound = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.credentials())
        )
    except (RuntimeError, OSError) as error:
        raise RequestError(
            f"cannot listen on {address}",
            field="--grpc-port",
            remedy="It may be in use: choose another port or host, or 0 for any free port",
        ) from error
    return int(bound)


def _try_port(host: str, port: int) -> None:
    """Bind and close the port first, because gRPC writes to stderr if it cannot bind.

    Raises:
        OSError: the address is not available.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(place)
