"""The gRPC port of a server: its services, health and reflection."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import grpc.aio

from trtc.runtime.frontends.base import Frontend, is_loopback
from trtc.runtime.frontends.grpc.caller import Door
from trtc.runtime.frontends.grpc.health import Health
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.frontends.grpc.kserve.servicer import KServeServicer
from trtc.runtime.frontends.grpc.server import bind, make_server
from trtc.runtime.frontends.grpc.servicer import InferenceServicer
from trtc.runtime.frontends.grpc.smg.servicer import TrtllmServicer
from trtc.runtime.service.service import Service
from trtc.runtime.wire.methods import SERVICE
from trtc.runtime.wire.tls import ServerTls

_log = logging.getLogger("trtc.server")


@dataclass(frozen=True)
class GrpcConfig:
    host: str = "127.0.0.1"
    port: int = 8001
    """0: any free port."""
    tls: ServerTls | None = None
    kv_events: bool = False
    """Whether SMG may subscribe to KV events."""

    def frontend(self, service: Service) -> "GrpcFrontend":
        return GrpcFrontend(self, service)


class GrpcFrontend(Frontend):
    """Every service over gRPC, on one port."""

    name: ClassVar[str] = "grpc"

    def __init__(self, config: GrpcConfig, service: Service) -> None:
        super().__init__(config.host)
        self._config = config
        self._service = service
        self._health = Health()
        self._intake = Intake(service.intake, service.access)
        self._server: grpc.aio.Server | None = None
        self._door: Door | None = None
        self._names: tuple[str, ...] = ()
        """Services that health checks know; "" is the server."""

    async def start(self) -> None:
        config = self._config
        if config.tls is None and not is_loopback(config.host):
            _log.warning(
                "--host %s is reached from other machines, and there is no TLS: prompts, tokens "
                "and keys travel in the clear. Give --tls-cert and --tls-key, or put a TLS proxy "
                "before it",
                config.host,
            )
        services = (
            InferenceServicer(self._service, self._intake).grpc_service(),
            KServeServicer(self._service, self._intake).grpc_service(),
            TrtllmServicer(self._service, self._intake, kv_events=config.kv_events).grpc_service(),
        )
        self._names = ("", *(one.name for one in services))
        access = self._service.access
        if access.needs_keys:
            self._door = Door(access, [path for one in services for path in one.probe_paths])
        self._server = make_server(services, self._health, self._service.limits, self._door)
        self.port = bind(self._server, config.host, config.port, config.tls)
        self._service.models.on_change(self._report_health)
        await self._server.start()

    def drain(self) -> None:
        self._intake.drain()
        if self._door is not None:
            self._door.drain()
        self._health.close()

    async def close(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace=grace_s)

    def _report_health(self) -> None:
        """The whole server serves when every engine does that it is to serve."""
        models = self._service.models
        serving = {f"{SERVICE}/{name}": models.is_ready(name) for name in models.names}
        is_ready = not models.why_not_ready()
        self._health.set({**serving, **dict.fromkeys(self._names, is_ready)})
