"""grpc.health.v1 for the whole server (""), for trtc.v1.Inference, and for each engine by name.

The library's own asyncio servicer holds a lock while it writes to a watcher, so one watcher that
never reads would block all status changes; here a change only sets flags.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library is untyped
    """Statuses by service name, and the handlers of the health service."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, serving: Mapping[str, bool]) -> None:
        """Set which services exist, and whether each serves; watchers receive only the latest
        status."""
        self._serving = dict(serving)
        self._wake()

    def close(self) -> None:
        """Set all services to not serving; watchers' streams end after the last status."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._wake()

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"service: {request.service[:100]!r} is not known; known: {sorted(self._serving)}",
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(
        self,
        request: health_pb2.HealthListRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> health_pb2.HealthListResponse:
        statuses = {
            service: health_pb2.HealthCheckResponse(status=self._status(service))
            for service in self._serving
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        sent = None
        while True:
            changed, closed = self._changed, self._closed
            status = self._status(request.service)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            if closed:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._serving:
            return int(SERVICE_UNKNOWN)
        return int(SERVING if self._serving[service] else NOT_SERVING)

    def _wake(self) -> None:
        """Wake all watchers. Each event is set once and replaced, so that no watcher can miss or
        block a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
