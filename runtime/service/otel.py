"""Traces and metrics of requests by OpenTelemetry's conventions for generative AI; never content.

    call's traceparent ─► span of the request: model, parameters, tokens, times ─► OTLP, in batches
                     └──► histograms of all requests                            ─► OTLP, each minute

Names are those of the semantic conventions for generative AI, which are in development; times
within a request have vLLM's names (`gen_ai.latency.*`). Spans wait in a bounded queue of the SDK
for its export thread; if the collector is unreachable, they are dropped.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trtc.protos.errors import EnvironmentFault, TrtcError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.call import current_call
from trtc.runtime.requests.request import GenerationRequest, Output, Usage
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.progress import LEFT
from trtc.version import __version__

CLOSE_S = 5.0
"""Seconds to send the remaining telemetry when the server ends."""
PROTOCOLS = ("http/protobuf", "grpc")
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"

DURATION_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bounds of buckets recommended by the conventions."""


class OpenTelemetry:
    """Implements Telemetry over providers of traces and metrics, which it shuts down."""

    def __init__(
        self,
        traces: TracerProvider,
        metrics: MeterProvider,
        exporters: Sequence[SpanExporter | MetricExporter] = (),
    ) -> None:
        """
        Args:
            exporters: exporters of both, which are shut down if the collector does not answer.
        """
        self._providers = (traces, metrics)
        self._exporters = exporters
        self._tracer = traces.get_tracer("trtc", __version__)
        self._context = TraceContextTextMapPropagator()
        meter = metrics.get_meter("trtc", __version__)

        def histogram(name: str, what: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(
                name, "s", what, explicit_bucket_boundaries_advisory=list(bounds)
            )

        self.duration = histogram(
            "gen_ai.server.request.duration", "From a request's arrival to its end.", DURATION_S
        )
        self.first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "From a request's arrival to its first token, of those that succeed.",
            FIRST_TOKEN_S,
        )
        self.per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "Between tokens after the first one, of requests that succeed.",
            PER_TOKEN_S,
        )

    @contextmanager
    def recording(
        self, handle: EngineHandle, request_input: RequestInput
    ) -> Iterator["RequestTrace"]:
        call, began_ns = current_call(), time.time_ns()
        labels = {
            "gen_ai.operation.name": "chat"
            if request_input.chat is not None
            else "text_completion",
            "gen_ai.provider.name": "trtc",
            "gen_ai.request.model": request_input.model or handle.name,
            "gen_ai.response.model": handle.name,
        }
        span = self._tracer.start_span(
            f"{labels['gen_ai.operation.name']} {handle.name}",
            self._context.extract(
                {"traceparent": call.traceparent, "tracestate": call.tracestate}
                if call.traceparent
                else {}
            ),
            SpanKind.SERVER,
            {**labels, "trtc.call_id": call.id},
            start_time=began_ns,
        )
        trace = RequestTrace(self, span, labels, began_ns)
        try:
            yield trace
        except TrtcError as error:
            trace.fail(type(error).__name__)
            raise
        except asyncio.CancelledError:
            if not trace.is_admitted:
                trace.fail(LEFT)
            raise
        finally:
            trace.end()

    def close(self) -> None:
        """Shut down in a daemon thread, so that a collector that does not answer cannot delay the
        exit."""
        closing = threading.Thread(target=self._shut_down, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        for exporter in self._exporters if closing.is_alive() else ():
            exporter.shutdown()

    def _shut_down(self) -> None:
        for provider in self._providers:
            provider.shutdown()


class RequestTrace:
    """One request's span (implements Watcher). Times are time.monotonic()."""

    def __init__(
        self, telemetry: OpenTelemetry, span: Span, labels: dict[str, str], began_ns: int
    ) -> None:
        self._telemetry = telemetry
        self._span = span
        self._labels = labels
        self._began_ns = began_ns
        self._arrived_at = self._admitted_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._num_tokens = 0
        self._reasons: list[str] = []
        self._usage: Usage | None = None
        self._outcome = ""
        self.is_admitted = False

    def admit(self, request: GenerationRequest) -> None:
        self.is_admitted = True
        self._admitted_at = time.monotonic()
        if self._span.is_recording():
            self._span.set_attributes(_parameters(request))

    def deliver(self, outputs: Sequence[Output], at: float) -> None:
        for output in outputs:
            if output.token_ids:
                self._num_tokens += len(output.token_ids)
                if self._first_at is None:
                    self._first_at = at
                    self._span.add_event("gen_ai.first_token", timestamp=self._ns(at))
                self._last_at = at
            if output.finish_reason is not None:
                self._reasons.append(output.finish_reason.value)
            self._usage = output.usage or self._usage

    def fail(self, outcome: str) -> None:
        self._outcome = self._outcome or outcome

    def end(self) -> None:
        """End the span; call it once, when the request has ended."""
        ended_at = time.monotonic()
        labels = self._labels
        if self._outcome:
            labels = {**labels, "error.type": self._outcome}
            self._span.set_attribute("error.type", self._outcome)
            self._span.set_status(StatusCode.ERROR)
        if self._span.is_recording():
            self._span.set_attributes(self._results(ended_at))
        self._span.end(self._ns(ended_at))
        self._telemetry.duration.record(ended_at - self._arrived_at, labels)
        if self._first_at is not None and not self._outcome:
            self._telemetry.first_token.record(self._first_at - self._arrived_at, labels)
            if self._num_tokens > 1:
                spent = (self._last_at - self._first_at) / (self._num_tokens - 1)
                self._telemetry.per_token.record(spent, labels)

    def _results(self, ended_at: float) -> dict[str, Any]:
        """Tokens and times, as far as they are known."""
        found: dict[str, Any] = {
            "gen_ai.usage.output_tokens": self._num_tokens,
            "gen_ai.response.finish_reasons": self._reasons,
            "gen_ai.latency.e2e": ended_at - self._arrived_at,
        }
        usage, first_at = self._usage, self._first_at
        if usage is not None:
            found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_prompt_tokens
        if usage is not None and usage.queue_s is not None:
            found["gen_ai.latency.time_in_queue"] = usage.queue_s
        if first_at is not None:
            found["gen_ai.latency.time_to_first_token"] = first_at - self._arrived_at
            found["gen_ai.latency.time_in_model_decode"] = self._last_at - first_at
        if first_at is not None and usage is not None and usage.queue_s is not None:
            prefill_s = first_at - self._admitted_at - usage.queue_s
            found["gen_ai.latency.time_in_model_prefill"] = max(0.0, prefill_s)
        return found

    def _ns(self, at: float) -> int:
        return self._began_ns + int((at - self._arrived_at) * 1e9)


def connected(endpoint: str) -> OpenTelemetry:
    """Telemetry to an OTLP collector; OpenTelemetry's environment variables set the other options.

    Args:
        endpoint: URL of the collector; "": from these variables.

    Raises:
        EnvironmentFault: their protocol is unknown or not installed.
    """
    resource = Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "trtc"),
            "service.version": __version__,
        }
    )
    spans, metrics = _exporters(endpoint)
    # No shutdown at the interpreter's exit: it would wait for a collector that does not answer.
    traces = TracerProvider(resource=resource, shutdown_on_exit=False)
    readers = []
    if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
        traces.add_span_processor(BatchSpanProcessor(spans))
    if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
        readers.append(PeriodicExportingMetricReader(metrics))
    meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    return OpenTelemetry(traces, meters, (spans, metrics))


def _exporters(endpoint: str) -> tuple[SpanExporter, MetricExporter]:
    protocol = os.environ.get(_PROTOCOL) or PROTOCOLS[0]
    if protocol == "grpc":
        return _grpc_exporters(endpoint)
    if protocol != "http/protobuf":
        raise EnvironmentFault(
            f"is {protocol[:100]!r}", field=_PROTOCOL, remedy=f"Give {' or '.join(PROTOCOLS)}"
        )
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if not endpoint:
        return OTLPSpanExporter(), OTLPMetricExporter()
    return (
        OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces"),
        OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics"),
    )


def _grpc_exporters(endpoint: str) -> tuple[SpanExporter, MetricExporter]:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    if not endpoint:
        return OTLPSpanExporter(), OTLPMetricExporter()
    return OTLPSpanExporter(endpoint=endpoint), OTLPMetricExporter(endpoint=endpoint)


def _parameters(request: GenerationRequest) -> dict[str, Any]:
    """The request's parameters, defaults included. Stop strings are left out, as client content."""
    sampling = request.sampling
    found: dict[str, Any] = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed & ((1 << 63) - 1)
    return found
