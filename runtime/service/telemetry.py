"""Configuration and interface of OpenTelemetry export.

The library is imported when telemetry is opened (`service.otel`).
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
"""Environment variables, any of which turns telemetry on."""


@dataclass(frozen=True)
class TelemetryConfig:
    endpoint: str = ""
    """URL of an OTLP collector; "": from OpenTelemetry's variables."""


class Telemetry(Protocol):
    """Traces requests. Its failures do not affect them."""

    def recording(
        self, handle: EngineHandle, request_input: RequestInput
    ) -> AbstractContextManager[Watcher]:
        """Trace the request that is served within the context, as part of the call's trace."""
        ...

    def close(self) -> None:
        """Send the remaining telemetry, within some seconds."""
        ...


def telemetry_config(
    endpoint: str | None, environment: Mapping[str, str] = os.environ
) -> TelemetryConfig | None:
    """The configuration from the option and the environment; None: telemetry is off.

    Raises:
        RequestError: the option is not a URL.
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
    """Import OpenTelemetry and connect.

    Raises:
        EnvironmentFault: OpenTelemetry is not installed, or its variables are invalid.
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
