"""Traces and metrics of requests, as an OpenTelemetry collector gets them."""

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.openai_sdk import ECHO
from tests.support.servers import CONFIG, EOS, EchoEngine, RunningServer, echo_server
from trtc.cli import main
from trtc.protos.errors import EnvironmentFault, InvalidRequestError, RequestError
from trtc.protos.trtc.v1 import inference_pb2 as own
from trtc.runtime.client.aio import AsyncClient
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.server import app
from trtc.runtime.service.telemetry import TelemetryConfig, open_telemetry, telemetry_config

pytest.importorskip("opentelemetry.sdk", reason="make setup installs it")

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.trace import SpanKind, StatusCode

from trtc.runtime.service import otel

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "the quick brown fox"
SLOW = EchoEngine(EchoOptions(step_s=0.005, never=(EOS,)))


class Memory:
    """Telemetry that stays in the process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        traces = TracerProvider(shutdown_on_exit=False)
        traces.add_span_processor(SimpleSpanProcessor(self.exporter))
        metrics = MeterProvider([self.reader], shutdown_on_exit=False)
        telemetry = otel.OpenTelemetry(traces, metrics)
        patch.setattr(app, "open_telemetry", lambda config: telemetry)

    @property
    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def points(self) -> dict[str, list[Any]]:
        """Metric -> its points."""
        (resource,) = self.reader.get_metrics_data().resource_metrics  # type: ignore[union-attr]
        (scope,) = resource.scope_metrics
        return {one.name: list(one.data.data_points) for one in scope.metrics}


ON = replace(CONFIG, telemetry=TelemetryConfig("http://127.0.0.1:1"))


async def chat(server: RunningServer, headers: dict[str, str], **fields: Any) -> int:
    """The status of a chat over HTTP."""
    messages = [{"role": "user", "content": SECRET}]
    body = {"model": "echo", "messages": messages, "max_tokens": 5, "stop": ["fox"], **fields}

    def ask() -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.http_port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
            return int(answer.status)

    return await asyncio.to_thread(ask)


async def generate(address: str, metadata: tuple[tuple[str, str], ...]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_stream("/trtc.v1.Inference/Generate")(  # type: ignore[call-arg]
            own.GenerateRequest(
                token_ids=own.TokenIds(ids=[5, 6, 7]), max_tokens=4, ignore_eos=True
            ).SerializeToString(),
            metadata=metadata,
        )
        assert [one async for one in call]


@asynchronous
async def test_a_request_is_a_span_in_its_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    async with echo_server(ECHO, config=ON) as server:
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "mine"}
        assert await chat(server, headers, seed=7, temperature=0.5, n=2) == 200
        await generate(server.address, (("traceparent", TRACEPARENT),))
        await generate(server.address, ())
        await generate(server.address, (("traceparent", "nonsense"),))
        await eventually(lambda: len(memory.spans) == 4, "all spans have ended")
    first, second, *roots = memory.spans
    for span in (first, second):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert span.kind is SpanKind.SERVER
    assert first.context.trace_state.get("vendor") == "1"
    assert [span.parent for span in roots] == [None, None]
    found = first.attributes
    assert first.name == "chat echo"
    assert found[names.GEN_AI_OPERATION_NAME] == "chat"
    assert found[names.GEN_AI_PROVIDER_NAME] == "trtc"
    assert found[names.GEN_AI_REQUEST_MODEL] == found[names.GEN_AI_RESPONSE_MODEL] == "echo"
    assert found[names.GEN_AI_RESPONSE_ID].startswith("chatcmpl-")
    assert found[names.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert found[names.GEN_AI_REQUEST_SEED] == 7
    assert found[names.GEN_AI_REQUEST_MAX_TOKENS] == 5
    assert found[names.GEN_AI_REQUEST_CHOICE_COUNT] == 2
    assert len(found[names.GEN_AI_RESPONSE_FINISH_REASONS]) == 2
    assert found[names.GEN_AI_USAGE_INPUT_TOKENS] > 0
    assert found[names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 0
    assert found["trtc.call_id"] == "mine"
    assert len(second.attributes["trtc.call_id"]) == 32
    assert second.name == "text_completion echo"
    assert second.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 4
    told = {key.removeprefix("gen_ai.latency.") for key in found if "latency" in key}
    assert told == {
        *("e2e", "time_in_queue", "time_to_first_token"),
        *("time_in_model_prefill", "time_in_model_decode"),
    }
    (event,) = first.events
    assert event.name == "gen_ai.first_token"
    assert first.start_time < event.timestamp <= first.end_time
    since = (event.timestamp - first.start_time) / 1e9
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(since, abs=1e-5)
    in_parts = sum(
        found[f"gen_ai.latency.{part}"] for part in told - {"e2e", "time_to_first_token"}
    )
    assert in_parts <= found["gen_ai.latency.e2e"]
    known = {value for name, value in vars(names).items() if name.startswith("GEN_AI_")}
    for key in (key for span in memory.spans for key in span.attributes):
        assert key in known or key.startswith(("gen_ai.latency.", "trtc.")), key
    assert "fox" not in "".join(span.to_json() for span in memory.spans), "never content"


@asynchronous
async def test_requests_that_fail_say_how_and_metrics_count_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(monkeypatch)
    async with echo_server(SLOW, config=ON) as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(InvalidRequestError):
                await client.generate([1], max_tokens=10**6).result()
            async for _ in client.generate([1, 2], max_tokens=5):
                pass
        async with AsyncClient(server.address) as client:
            leaving = client.generate([1], max_tokens=500)
            await anext(leaving)
        await eventually(lambda: len(memory.spans) == 3, "all spans have ended")
        points = memory.points()
    outcomes = {span.attributes.get("error.type"): span for span in memory.spans}
    assert set(outcomes) == {None, "ContextLengthError", "left"}
    assert outcomes["left"].status.status_code is StatusCode.ERROR
    assert outcomes[None].status.status_code is StatusCode.UNSET
    assert "gen_ai.latency.time_to_first_token" not in outcomes["ContextLengthError"].attributes
    durations = points[gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION]
    assert sum(one.count for one in durations) == 3
    assert {one.attributes.get("error.type") for one in durations} == set(outcomes)
    for name, bounds in (
        (gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, otel.FIRST_TOKEN_S),
        (gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, otel.PER_TOKEN_S),
    ):
        (point,) = points[name]
        assert (point.count, tuple(point.explicit_bounds)) == (1, bounds)
    assert set(points) == {
        one for one in vars(gen_ai_metrics).values() if str(one).startswith("gen_ai.server.")
    }
    (point,) = points[gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN]
    assert 0.005 <= point.sum < 1


class Collector:
    """What an OTLP collector was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: set[str] = set()
        self.services: set[str] = set()

    def take_spans(self, request: Any) -> None:
        for resource in request.resource_spans:
            for one in resource.resource.attributes:
                if one.key == "service.name":
                    self.services.add(one.value.string_value)
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def take_metrics(self, request: Any) -> None:
        for resource in request.resource_metrics:
            self.metrics |= {one.name for scope in resource.scope_metrics for one in scope.metrics}


@contextmanager
def http_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raise AssertionError("nothing asks for compression")
            if self.path == "/v1/traces":
                collector.take_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            else:
                assert self.path == "/v1/metrics"
                collector.take_metrics(
                    metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
                )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take_spans(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize("protocol", otel.PROTOCOLS)
@asynchronous
async def test_a_collector_gets_spans_and_metrics_by_the_time_the_server_has_ended(
    protocol: str,
) -> None:
    over_grpc = protocol == "grpc"
    with (
        grpc_collector() if over_grpc else http_collector() as (collector, url),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        if over_grpc:
            patch.setenv("OTEL_METRICS_EXPORTER", "none")
            patch.setenv("OTEL_SERVICE_NAME", "mine")
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        config = replace(CONFIG, telemetry=telemetry_config(None if over_grpc else url))
        async with echo_server(config=config) as server:
            await generate(server.address, (("traceparent", TRACEPARENT),))
        (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert collector.services == {"mine" if over_grpc else "trtc"}
    assert over_grpc or collector.metrics == {
        one for one in vars(gen_ai_metrics).values() if str(one).startswith("gen_ai.server.")
    }


@asynchronous
async def test_a_collector_that_is_away_delays_neither_requests_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.2)
    async with echo_server(config=ON) as server:
        for _ in range(3):
            await generate(server.address, (("traceparent", TRACEPARENT),))
        begin = time.monotonic()
    assert time.monotonic() - begin < 5


def test_telemetry_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry_config(None, {}) is None
    where = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}
    assert telemetry_config(None, where) == TelemetryConfig()
    assert telemetry_config("http://x:1", {"OTEL_SDK_DISABLED": "true"}) is None
    code = (
        "import sys; import trtc.commands.serve, trtc.runtime.server.app; "
        "sys.exit(any(one.startswith('opentelemetry') for one in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_missing_or_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=r"--otlp-endpoint: is 'collector:4318'. Give a URL"):
        telemetry_config("collector:4318")
    assert main(["serve", "x", "--otlp-endpoint", "collector"]) == 2
    assert "--otlp-endpoint" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(EnvironmentFault, match="OTEL_EXPORTER_OTLP_PROTOCOL: is 'http/json'"):
        open_telemetry(TelemetryConfig())
    monkeypatch.setitem(sys.modules, "trtc.runtime.service.otel", None)
    with pytest.raises(EnvironmentFault, match=r"--otlp-endpoint: .*trtc\[opentelemetry\]"):
        open_telemetry(TelemetryConfig("http://x:1"))
