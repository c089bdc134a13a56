"""The gRPC port of a server: its services, health and reflection."""

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar

import grpc.aio
from grpc_health.v1 import health

from trtc.runtime.frontends.base import Frontend, is_loopback
from trtc.runtime.frontends.grpc.caller import Door
from trtc.runtime.frontends.grpc.calls import GrpcService
from trtc.runtime.frontends.grpc.health import Health
from trtc.runtime.frontends.grpc.host_connections import HostConnections
from trtc.runtime.frontends.grpc.intake import Intake
from trtc.runtime.frontends.grpc.lazy_service import LazyService
from trtc.runtime.frontends.grpc.server import bind, make_server
from trtc.runtime.frontends.grpc.servicer import InferenceServicer
from trtc.runtime.service.service import Service
from trtc.runtime.wire.methods import SERVICE
from trtc.runtime.wire.tls import ServerTls

PRELOAD_AFTER_S = 1.0
"""Seconds from the start of the port to the imports of protocols that have not been called yet."""
_HERE = "trtc.runtime.frontends.grpc"

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
    """All gRPC services, on one port."""

    name: ClassVar[str] = "grpc"

    def __init__(self, config: GrpcConfig, service: Service) -> None:
        super().__init__(config.host)
        self._config = config
        self._service = service
        self._health = Health()
        self._intake = Intake(service.intake, service.access)
        self._server: grpc.aio.Server | None = None
        self._door: Door | None = None
        self._preloading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._services = (
            LazyService(SERVICE, f"{_HERE}.servicer", self._inference),
            LazyService("inference.GRPCInferenceService", f"{_HERE}.kserve.servicer", self._kserve),
            LazyService("trtllm.TrtllmService", f"{_HERE}.smg.servicer", self._smg),
        )
        self._reflection = LazyService(
            "grpc.reflection.v1alpha.ServerReflection", f"{_HERE}.reflection", self._reflect
        )

    async def start(self) -> None:
        config = self._config
        if config.tls is None and not is_loopback(config.host):
            _log.warning(
                "--host %s is reached from other machines, and there is no TLS: prompts, tokens "
                "and keys travel in the clear. Give --tls-cert and --tls-key, or put a TLS proxy "
                "before it",
                config.host,
            )
        access = self._service.access
        if access.needs_keys:
            self._door = Door(access, self._is_probe)
        services = (*self._services, self._reflection)
        self._server = make_server(services, self._health, self._service.limits, self._door)
        self.port = bind(self._server, config.host, config.port, config.tls)
        self._service.models.on_change(self._report_health)
        await self._server.start()
        self._preloading = asyncio.create_task(self._preload(), name="trtc-preload-grpc")
        hosts = HostConnections(self.port, self._service.limits.max_connections)
        self._watching = asyncio.create_task(hosts.watch(), name="trtc-watch-hosts")

    def drain(self) -> None:
        self._intake.drain()
        if self._door is not None:
            self._door.drain()
        self._health.close()

    async def close(self, grace_s: float) -> None:
        for task in (self._preloading, self._watching):
            if task is not None:
                task.cancel()
        if self._server is not None:
            await self._server.stop(grace=grace_s)

    async def _preload(self) -> None:
        """Import the protocols, after a delay: their first calls need not wait for imports, and the
        imports do not delay the first token after a start."""
        await asyncio.sleep(PRELOAD_AFTER_S)
        for one in (*self._services, self._reflection):
            await asyncio.to_thread(one.preload)

    def _is_probe(self, path: str) -> bool:
        return any(one.is_probe(path) for one in self._services)

    def _report_health(self) -> None:
        """Update the health service: the server as a whole serves if all wanted engines do."""
        models = self._service.models
        serving = {f"{SERVICE}/{name}": models.is_ready(name) for name in models.names}
        is_ready = not models.why_not_ready()
        names = ("", *(one.name for one in self._services))  # "" is the server
        self._health.set({**serving, **dict.fromkeys(names, is_ready)})

    def _inference(self) -> GrpcService:
        return InferenceServicer(self._service, self._intake).grpc_service()

    def _kserve(self) -> GrpcService:
        from trtc.runtime.frontends.grpc.kserve.servicer import KServeServicer

        return KServeServicer(self._service, self._intake).grpc_service()

    def _smg(self) -> GrpcService:
        from trtc.runtime.frontends.grpc.smg.servicer import TrtllmServicer

        return TrtllmServicer(
            self._service, self._intake, kv_events=self._config.kv_events
        ).grpc_service()

    def _reflect(self) -> GrpcService:
        from trtc.runtime.frontends.grpc.reflection import reflection_service

        names = [one.name for one in (*self._services, self._reflection)]
        files = [one.loaded.file for one in self._services]
        return reflection_service([*names, health.SERVICE_NAME], files)
