"""grpc.health.v1, reflection and the HTTP port."""

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support.aio import asynchronous
from tests.support.servers import CONFIG, EOS, EchoEngine, echo_server, frontends, greedy
from trtc.protos.errors import InvalidRequestError, UnavailableError
from trtc.protos.manifest import Canary
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.canary import compare, why_too_few
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc.frontend import GrpcConfig

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
PROMPT = (5, 6, 7)
GOOD = Canary(prompt_ids=PROMPT, token_ids=tuple(greedy(PROMPT, 8)))
BAD = Canary(prompt_ids=PROMPT, token_ids=(*greedy(PROMPT, 7), 511 - greedy(PROMPT, 8)[7]))
SLOW = EchoEngine(EchoOptions(step_s=0.02, never=(EOS,)))


async def get(port: int, path: str) -> tuple[int, str]:
    """Fetch in a thread: the server's HTTP thread answers without the event loop."""

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def check(channel: grpc.aio.Channel, service: str) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@asynchronous
async def test_a_server_whose_canaries_sing_is_serving() -> None:
    engine = EchoEngine(canaries=(GOOD, GOOD))
    async with (
        echo_server(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for service in ("", "trtc.v1.Inference", "trtc.v1.Inference/echo"):
            assert await check(channel, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "trtc.v2.Inference")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        every = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert {"", "trtc.v1.Inference", "trtc.v1.Inference/echo"} <= set(every.statuses)
        assert {one.status for one in every.statuses.values()} == {SERVING}
        port = server.http_port
        assert await get(port, "/healthz") == (200, '{"status": "alive"}\n')
        assert await get(port, "/readyz") == (200, '{"status": "ready", "reasons": {}}\n')


@asynchronous
async def test_a_canary_with_other_tokens_keeps_the_server_from_serving_and_says_why() -> None:
    engine = EchoEngine(canaries=(GOOD, BAD))
    async with (
        echo_server(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        AsyncClient(server.address) as client,
    ):
        for service in ("", "trtc.v1.Inference", "trtc.v1.Inference/echo"):
            assert await check(channel, service) == NOT_SERVING
        status, body = await get(server.http_port, "/readyz")
        assert status == 503
        reason = json.loads(body)["reasons"]["echo"]
        assert reason.startswith("canary 1 gives other tokens than at build, first at position 7")
        assert (await get(server.http_port, "/healthz"))[0] == 200
        with pytest.raises(UnavailableError, match="canary 1 gives other tokens"):
            await client.generate([1], max_tokens=1).result()


@asynchronous
async def test_a_canary_that_cannot_run_says_why() -> None:
    engine = EchoEngine(canaries=(Canary(prompt_ids=(9999,), token_ids=(1,)),))
    async with echo_server(engine) as server:
        assert "canary 0 could not run" in server.server.service.why_not_ready()["echo"]


@asynchronous
async def test_watchers_see_draining_even_beside_one_that_never_reads() -> None:
    async with (
        echo_server(SLOW) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        AsyncClient(server.address) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="trtc.v1.Inference")
        stalled = stub.Watch(request)
        await asyncio.sleep(0.05)
        watch = stub.Watch(request)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="none"))
        assert (await watch.read()).status == SERVING
        assert (await unknown.read()).status == UNKNOWN
        generation = client.generate([1], max_tokens=30)
        await anext(generation)
        closing = asyncio.create_task(server.server.close())
        assert (await watch.read()).status == NOT_SERVING
        assert await get(server.http_port, "/readyz") == (
            503,
            '{"status": "not ready", "reasons": {"echo": "draining"}}\n',
        )
        with pytest.raises(UnavailableError, match="shutting down"):
            await client.generate([1], max_tokens=1).result()
        result = await generation.result()
        assert len(result.token_ids) == 30, "a running request is let to its end"
        await closing
        assert stalled.done() or stalled.cancel()


@asynchronous
async def test_reflection_tells_what_grpcurl_needs() -> None:
    async with (
        echo_server() as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(**fields: str) -> Any:
            request = reflection_pb2.ServerReflectionRequest(**fields)
            call = stub.ServerReflectionInfo(iter([request]))
            responses = [response async for response in call]
            assert len(responses) == 1
            return responses[0]

        listed = (await ask(list_services="")).list_services_response.service
        assert {service.name for service in listed} == {
            "trtc.v1.Inference",
            "inference.GRPCInferenceService",
            "trtllm.TrtllmService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        found = await ask(file_containing_symbol="trtc.v1.Inference")
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in found.file_descriptor_response.file_descriptor_proto
        ]
        assert files[0].name == "trtc/v1/inference.proto"
        methods = {method.name for method in files[0].service[0].method}
        assert methods == {"Generate", "Abort", "Tokenize", "Detokenize", "GetModelInfo"}
        found = await ask(file_containing_symbol="inference.ModelInferRequest")
        assert found.file_descriptor_response.file_descriptor_proto


async def scrape(port: int) -> dict[str, float]:
    """Every sample as `name{label="value",...}`."""
    status, text = await get(port, "/metrics")
    assert status == 200
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynchronous
async def test_metrics_count_what_happened() -> None:
    engine = EchoEngine(EchoOptions(never=(EOS,)), canaries=(GOOD,))
    async with echo_server(engine) as server, AsyncClient(server.address) as client:
        for number in range(3):
            await client.generate([number + 1] * 20, max_tokens=5, ignore_eos=True).result()
        with pytest.raises(InvalidRequestError):
            await client.generate([1], max_tokens=0).result()
        await server.idle()
        port = server.http_port
        samples = await scrape(port)
        model = "[('model_name', 'echo')]"
        for name, value in {
            "trtc_prompt_tokens_total": 60,
            "trtc_generation_tokens_total": 15,
            "trtc_time_to_first_token_seconds_count": 3,
            "trtc_e2e_request_latency_seconds_count": 3,
            "trtc_inter_token_latency_seconds_count": 12,
            "trtc_request_decode_time_seconds_count": 3,
            "trtc_request_queue_time_seconds_count": 3,
            "trtc_num_requests_running": 0,
            "trtc_num_requests_waiting": 0,
            "trtc_kv_cache_usage_perc": 0,
            "trtc_kv_pages": 256,
            "trtc_engine_ready": 1,
            "trtc_num_preemptions_total": 0,
        }.items():
            assert samples[f"{name}{model}"] == value, name
        success = (
            "trtc_request_success_total[('finished_reason', 'length'), ('model_name', 'echo')]"
        )
        assert samples[success] == 3
        failure = (
            "trtc_request_failure_total[('error', 'InvalidRequestError'), ('model_name', 'echo')]"
        )
        assert samples[failure] == 1
        queue_s = samples[f"trtc_request_queue_time_seconds_sum{model}"]
        assert 0 < queue_s < samples[f"trtc_e2e_request_latency_seconds_sum{model}"]
        assert samples[f"trtc_prefix_cache_queries_total{model}"] > 0
        assert samples[f"trtc_engine_steps_total{model}"] >= 15
        assert samples["trtc_startup_seconds[('phase', 'open:echo')]"] > 0
        status, text = await get(port, "/brew")
        assert status == 404
        assert {"/metrics", "/healthz", "/readyz", "/v1/models"} <= set(json.loads(text)["known"])


@asynchronous
async def test_metrics_see_running_requests_and_their_pages() -> None:
    async with echo_server(SLOW) as server, AsyncClient(server.address) as client:
        generations = [client.generate([number], max_tokens=500) for number in range(4)]
        for generation in generations:
            await anext(generation)
        samples = await scrape(server.http_port)
        assert samples["trtc_num_requests_running[('model_name', 'echo')]"] == 4
        assert samples["trtc_kv_pages_used[('model_name', 'echo')]"] >= 4
        for generation in generations:
            generation.cancel()
        await server.idle()
        samples = await scrape(server.http_port)
        cancelled = (
            "trtc_request_failure_total[('error', 'CancelledError'), ('model_name', 'echo')]"
        )
        assert samples[cancelled] == 4


@asynchronous
async def test_ipv6() -> None:
    async with echo_server(config=replace(CONFIG, frontends=frontends("::1"))) as server:
        address = server.address
        async with AsyncClient(address) as client:
            await client.generate([1], max_tokens=1).result()
        url = f"http://[::1]:{server.http_port}/healthz"
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            assert answer.status == 200


@asynchronous
async def test_no_http_port_when_none_is_asked() -> None:
    async with echo_server(config=replace(CONFIG, frontends=(GrpcConfig(port=0),))) as server:
        assert list(server.server.frontends) == ["grpc"]


NEAR_TIE = Canary(
    prompt_ids=PROMPT,
    token_ids=BAD.token_ids,
    margins=(2.0,) * 7 + (0.1,) * (len(BAD.token_ids) - 7),
)
"""Another token than the engine's where it leads by a tenth of a logit."""


@pytest.mark.parametrize(("tolerance", "passes"), [(0.5, True), (0.05, False), (0.0, False)])
def test_a_rounding_tie_is_not_a_failure(tolerance: float, passes: bool) -> None:
    tokens = tuple(greedy(PROMPT, len(NEAR_TIE.token_ids)))
    assert compare(tokens, NEAR_TIE, tolerance) == (7, passes)


def test_a_first_token_is_never_a_tie() -> None:
    canary = Canary(prompt_ids=(1,), token_ids=(5, 6), margins=(0.0, 0.0))
    assert compare((4, 6), canary, 1.0) == (0, False)
    assert compare((5,), canary, 1.0) == (1, False), "a token is missing"
    assert compare((5, 6), canary, 1.0) == (2, True)


def test_too_few_tokens_before_ties_are_no_sign_of_health() -> None:
    canaries = [Canary(prompt_ids=(1,), token_ids=(5,) * 16)] * 4
    assert why_too_few(16, canaries) == ""
    assert "15 of 64 tokens" in why_too_few(15, canaries)


@asynchronous
async def test_a_server_with_a_rounding_tie_serves() -> None:
    engine = EchoEngine(canaries=(GOOD, NEAR_TIE), canary_tolerance=0.5)
    async with echo_server(engine) as server:
        assert server.server.service.why_not_ready() == {}
