"""What a server exports to OpenTelemetry, when, and where to.

The library is imported with the first telemetry that is opened (`service.otel`).
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.progress import Watcher

OPTION = "--otlp-endpoint"
ENDPOINTS = tuple(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT" for name in ("", "TRACES_", "METRICS_"))
"""Variables of the environment any of which turns telemetry on."""


@dataclass(frozen=True)
class TelemetryConfig:
    endpoint: str = ""
    """URL of an OTLP collector; "": as OpenTelemetry's variables say."""


class Telemetry(Protocol):
    """Follows requests. Nothing that befalls it befalls them."""

    def recording(
        self, handle: EngineHandle, request_input: RequestInput
    ) -> AbstractContextManager[Watcher]:
        """Follow the request that is served within the context, in the call's trace."""
        ...

    def close(self) -> None:
        """Send what waits, within some seconds."""
        ...


def telemetry_config(
    endpoint: str | None, environment: Mapping[str, str] = os.environ
) -> TelemetryConfig | None:
    """Of the option and the environment; None: telemetry is off.

    Raises:
        RequestError: the option is no URL.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None:
        return TelemetryConfig() if any(environment.get(one) for one in ENDPOINTS) else None
    if not endpoint.startswith(("http://", "https://")):
        raise RequestError(
            f"is {endpoint[:100]!r}", field=OPTION, remedy="Give a URL: http://HOST:4318"
        )
    return TelemetryConfig(endpoint.rstrip("/"))


def open_telemetry(config: TelemetryConfig) -> Telemetry:
    """
    Raises:
        EnvironmentFault: OpenTelemetry is not installed, or its variables are wrong.
    """
    try:
        from trtc.runtime.service.otel import connected
    except ImportError as error:
        raise EnvironmentFault(
            f"needs OpenTelemetry's SDK ({error.name} is missing)",
            field=OPTION if config.endpoint else " or ".join(ENDPOINTS[:1]),
            remedy="Install trtc[opentelemetry], or leave it out",
        ) from error
    return connected(config.endpoint)
