"""Who is let in, by gRPC and HTTP: keys, certificates, scopes, and keys that come and go."""

import asyncio
import contextlib
import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import grpc
import grpc.aio
import openai
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.aio import asynchronous
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.certificates import make_certificates
from tests.support.http1 import exchange, post
from tests.support.keys import holding, write_keys
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import CONFIG, EchoEngine, echo_server, frontends
from trtc.protos.errors import (
    ForbiddenError,
    RequestError,
    TrtcError,
    UnauthenticatedError,
    UnknownRequestError,
)
from trtc.runtime.client import AsyncClient, Client, ClientTls
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.http.page.files import page_files
from trtc.runtime.requests.principal import Principal, Scope
from trtc.runtime.server.app import ServerConfig
from trtc.runtime.service.access import AccessConfig, Peer

ALICE, BOB, PROMETHEUS = "alice's", "bob's", "prometheus'"


TENANTS = {
    "alice": holding(ALICE),
    "bob": holding(BOB),
    "prometheus": holding(PROMETHEUS, scopes=(Scope.METRICS,)),
}


@pytest.fixture
def keyed(tmp_path: Path) -> ServerConfig:
    """Needs the keys of TENANTS."""
    path = tmp_path / "keys.json"
    write_keys(path, TENANTS)
    return replace(CONFIG, access=AccessConfig(path))


def keys_of(config: ServerConfig) -> Path:
    assert config.access.api_keys is not None
    return config.access.api_keys


async def generate(address: str, key: str | None, tls: ClientTls | None = None) -> int:
    async with AsyncClient(address, tls=tls, api_key=key, timeout=10) as client:
        return len((await client.generate([1], max_tokens=2, ignore_eos=True).result()).token_ids)


async def get(
    port: int,
    path: str,
    headers: Mapping[str, str] | None = None,
    tls: ClientTls | None = None,
    method: str = "GET",
) -> http.client.HTTPResponse:
    def ask() -> http.client.HTTPResponse:
        connection: http.client.HTTPConnection
        if tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        else:
            context = ssl.create_default_context(cafile=str(tls.ca))
            if tls.cert is not None:
                context.load_cert_chain(tls.cert, tls.key)
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            answer.body = answer.read()  # type: ignore[attr-defined]
            return answer

    return await asyncio.to_thread(ask)


@asynchronous
async def test_every_call_needs_a_key_of_the_file(keyed: ServerConfig) -> None:
    async with echo_server(config=keyed) as server:
        assert await generate(server.address, ALICE) == 2
        for key, said in ((None, "an API key is missing"), ("guess", "is not known")):
            with pytest.raises(UnauthenticatedError, match=said):
                await generate(server.address, key)
            async with AsyncClient(server.address, api_key=key, timeout=10) as client:
                for call in (
                    client.info(),
                    client.tokenize("x"),
                    client.detokenize([1]),
                    client.abort("x"),
                ):
                    with pytest.raises(UnauthenticatedError):
                        await call
        with pytest.raises(ForbiddenError, match="inference"):
            await generate(server.address, PROMETHEUS)
        metrics = await get(server.http_port, "/metrics", {"x-api-key": PROMETHEUS})
        counted = b"trtc_calls_unauthenticated_total 10.0"
        assert counted in metrics.body  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((("authorization", f"Bearer {ALICE}"),), None),
        ((("authorization", f"bearer  {ALICE} "),), None),
        ((("x-api-key", ALICE),), None),
        ((("authorization", ALICE),), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", f"Basic {ALICE}"),), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", "Bearer "),), grpc.StatusCode.UNAUTHENTICATED),
        ((("x-api-key-bin", ALICE.encode()),), grpc.StatusCode.UNAUTHENTICATED),
        ((("x-api-key", "x" * 5000),), grpc.StatusCode.UNAUTHENTICATED),
        ((), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
@asynchronous
async def test_metadata_that_carries_a_key(
    metadata: tuple[tuple[str, str]], code: grpc.StatusCode | None, keyed: ServerConfig
) -> None:
    async with (
        echo_server(config=keyed) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.unary_unary("/trtc.v1.Inference/GetModelInfo", None, None)(
            b"", metadata=metadata
        )
        assert await call.code() is (code or grpc.StatusCode.OK)


@asynchronous
async def test_health_is_open_and_reflection_is_not(keyed: ServerConfig) -> None:
    async with (
        echo_server(config=keyed) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        async def reflect(key: str | None) -> FileDescriptorProto:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            metadata = () if key is None else (("x-api-key", key),)
            call = stub.ServerReflectionInfo(iter([asked]), metadata=metadata)
            return await call.read()

        await reflect(ALICE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflect(None)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


GRPC_PROBES = {
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/trtllm.TrtllmService/HealthCheck",
}


@asynchronous
async def test_no_method_of_any_service_but_probes_answers_strangers(keyed: ServerConfig) -> None:
    async with (
        echo_server(config=keyed) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        methods = await asyncio.to_thread(_all_methods, server.address, ALICE)
        assert len(methods) > 20
        answered = set()
        for method in methods:
            call = channel.unary_stream(method, None, None)(b"")
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await call.read()
            if not call.done() or await call.code() is not grpc.StatusCode.UNAUTHENTICATED:
                answered.add(method)
                call.cancel()
        assert answered == GRPC_PROBES


def _all_methods(address: str, key: str) -> list[str]:
    """What reflection tells a client that has a key."""
    with grpc.insecure_channel(address) as plain:
        database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(plain, _Keyed(key)))
        pool = DescriptorPool(database)
        return [
            f"/{service}/{method.name}"
            for service in database.get_services()
            for method in pool.FindServiceByName(service).methods
        ]


class _Keyed(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, key: str) -> None:
        self._key = key

    def intercept_stream_stream(self, continuation, details, requests):  # type: ignore[no-untyped-def]
        return continuation(details._replace(metadata=(("x-api-key", self._key),)), requests)


@asynchronous
async def test_no_path_of_any_dialect_but_probes_answers_strangers(keyed: ServerConfig) -> None:
    async with echo_server(config=keyed) as server:
        port = server.http_port
        unknown = await get(port, "/none", {"x-api-key": ALICE})
        paths = json.loads(unknown.body)["known"]  # type: ignore[attr-defined]
        assert {"/metrics", "/v1/chat/completions"} < set(paths)
        answered = {
            path
            for path in (*paths, "/none")
            for method in ("GET", "POST")
            if (await get(port, path, method=method)).status != 401
        }
    health = {"/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"}
    files = {f"/trtc/page/{name}" for name in page_files()} - {"/trtc/page/index.html"}
    assert answered == health | files | {"/"}


@asynchronous
async def test_a_stranger_is_refused_before_the_request_is_read(keyed: ServerConfig) -> None:
    async with (
        echo_server(config=keyed) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_stream("/trtc.v1.Inference/Generate", None, None)(None)
        async with asyncio.timeout(5):  # nothing is ever sent
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


@asynchronous
async def test_http_keeps_metrics_apart_and_health_open(keyed: ServerConfig) -> None:
    async with echo_server(config=keyed) as server:
        port = server.http_port
        for path in ("/healthz", "/readyz"):
            assert (await get(port, path)).status == 200
        for path in ("/metrics", "/other"):
            refused = await get(port, path)
            assert refused.status == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert "API key is missing" in json.loads(refused.body)["status"]  # type: ignore[attr-defined]
        assert (await get(port, "/metrics", {"Authorization": f"Bearer {ALICE}"})).status == 403
        for headers in ({"Authorization": f"Bearer {PROMETHEUS}"}, {"X-API-Key": PROMETHEUS}):
            assert (await get(port, "/metrics", headers)).status == 200


@asynchronous
async def test_the_openai_api_takes_keys(keyed: ServerConfig) -> None:
    async with echo_server(config=keyed) as server:
        for key, refusal in (
            ("unknown", openai.AuthenticationError),
            (PROMETHEUS, openai.PermissionDeniedError),
        ):
            async with sdk(server, api_key=key) as stranger:
                with pytest.raises(refusal):
                    await stranger.completions.create(model="echo", prompt=[1])
                with pytest.raises(refusal):
                    await stranger.models.list()
        async with sdk(server, api_key=ALICE) as alice:
            answer = await alice.completions.create(model="echo", prompt=[1], max_tokens=2)
            assert answer.usage is not None and answer.usage.prompt_tokens == 1


@asynchronous
async def test_keys_come_and_go_while_the_server_runs(
    keyed: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_of(keyed)
    async with (
        echo_server(config=keyed) as server,
        AsyncClient(server.address, api_key=ALICE, timeout=20) as alice,
    ):
        running = alice.generate([1], max_tokens=400, ignore_eos=True)
        await anext(aiter(running))
        write_keys(path, {"alice": holding("alice-new"), "carol": holding("carol's")})
        assert await generate(server.address, "alice-new") == 2
        assert await generate(server.address, "carol's") == 2
        for gone in (ALICE, BOB):
            with pytest.raises(UnauthenticatedError):
                await generate(server.address, gone)
        assert (await get(server.http_port, "/metrics", {"X-API-Key": PROMETHEUS})).status == 401
        assert len((await running.result()).token_ids) == 400

        path.write_text("{")
        assert await generate(server.address, "carol's") == 2
        assert "the last good ones stay" in caplog.text


@asynchronous
async def test_a_tenant_is_one_client_by_any_of_its_keys_over_any_connection(
    keyed: ServerConfig,
) -> None:
    write_keys(keys_of(keyed), {"alice": holding(ALICE, "second"), "bob": holding(BOB)})
    prompt = list(range(40, 104))
    slow = EchoEngine(EchoOptions(step_s=0.01))
    async with echo_server(slow, config=keyed) as server:

        async def cached(key: str) -> int:
            async with AsyncClient(server.address, api_key=key, timeout=10) as client:
                usage = (await client.generate(prompt, max_tokens=1).result()).usage
                return usage.cached_prompt_tokens

        assert await cached(ALICE) == 0
        assert await cached("second") > 0
        assert await cached(BOB) == 0
        async with (
            AsyncClient(server.address, api_key=ALICE, timeout=10) as alice,
            AsyncClient(server.address, api_key="second", timeout=10) as also_alice,
            AsyncClient(server.address, api_key=BOB, timeout=10) as bob,
        ):
            running = alice.generate([1], max_tokens=900, ignore_eos=True, request_id="one")
            await anext(aiter(running))
            with pytest.raises(UnknownRequestError):
                await bob.abort("one")
            await also_alice.abort("one")


@asynchronous
async def test_with_certificates_a_key_is_needed_too_and_the_key_names_the_tenant(
    keyed: ServerConfig, tmp_path: Path
) -> None:
    certificates = make_certificates(tmp_path)
    config = replace(
        keyed,
        frontends=frontends(tls=certificates.server(mutual=True)),
        access=replace(keyed.access, needs_certificate=True),
    )
    async with echo_server(config=config) as server:
        tls = certificates.client()
        assert await generate(server.address, ALICE, tls) == 2
        with pytest.raises(UnauthenticatedError):
            await generate(server.address, None, tls)
        with pytest.raises(TrtcError):
            await generate(server.address, ALICE, certificates.trusting)
        assert (await get(server.http_port, "/metrics", tls=tls)).status == 401
        headers = {"X-API-Key": PROMETHEUS}
        assert (await get(server.http_port, "/metrics", headers, tls)).status == 200
        alone = await get(server.http_port, "/metrics", headers, certificates.trusting)
        assert alone.status == 401
        assert b"no certificate" in alone.body  # type: ignore[attr-defined]


@asynchronous
async def test_with_mutual_tls_only_probes_come_without_a_certificate(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    config = replace(
        CONFIG,
        frontends=frontends(tls=certificates.server(mutual=True)),
        access=AccessConfig(needs_certificate=True),
    )
    async with echo_server(config=config) as server:
        port = server.http_port
        assert (await get(port, "/healthz", tls=certificates.trusting)).status == 200
        for path in ("/metrics", "/v1/models", "/none"):
            refused = await get(port, path, tls=certificates.trusting)
            assert refused.status == 401
            assert b"no certificate" in refused.body  # type: ignore[attr-defined]
        assert (await get(port, "/metrics", tls=certificates.client())).status == 200
        (tmp_path / "other").mkdir()
        stranger = replace(
            make_certificates(tmp_path / "other").client(), ca=certificates.trusting.ca
        )
        with pytest.raises(OSError):
            await get(port, "/healthz", tls=stranger)


ODD_SUBJECT = r'/C=DE/O=Mün,chen\+ "x"=\\<y>; z /OU=a/OU=b/SN=\+/CN=#odd '
"""With all that is escaped in a distinguished name."""


@asynchronous
async def test_a_certificate_names_the_same_tenant_over_grpc_and_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = make_certificates(
        tmp_path,
        ("client", "odd", "one", "two"),
        subjects={"odd": ODD_SUBJECT, "one": "/", "two": "/"},
    )
    config = replace(
        CONFIG,
        frontends=frontends(tls=certificates.server(mutual=True)),
        access=AccessConfig(needs_certificate=True),
    )
    async with echo_server(config=config) as server:
        access, admitted = server.server.service.access, []
        admit = access.admit

        def spy(peer: Peer, scope: Scope = Scope.INFERENCE) -> Principal:
            admitted.append(admit(peer, scope))
            return admitted[-1]

        monkeypatch.setattr(access, "admit", spy)
        names = []
        for name in ("client", "odd", "one", "two"):
            tls = certificates.client(name)
            async with AsyncClient(server.address, tls=tls, timeout=10) as client:
                await client.info()
            assert (await get(server.http_port, "/metrics", tls=tls)).status == 200
            over_grpc, over_http = admitted[-2:]
            assert over_grpc == over_http
            names.append(over_grpc.name)
    assert names[0] == "tenant CN=client,O=trtc"
    assert names[2:] == ["tenant spiffe://trtc/one", "tenant spiffe://trtc/two"], "not one tenant"


@asynchronous
async def test_the_openai_api_streams_over_mutual_tls(keyed: ServerConfig, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    config = replace(
        keyed,
        frontends=frontends(tls=certificates.server(mutual=True)),
        access=replace(keyed.access, needs_certificate=True),
    )
    with_certificate = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with_certificate.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    async with (
        echo_server(config=config) as server,
        openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{server.http_port}/v1",
            api_key=ALICE,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=with_certificate),
        ) as alice,
    ):
        stream = await alice.completions.create(
            model="echo", prompt=[1], max_tokens=5, stream=True, extra_body={"ignore_eos": True}
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == "length"


@asynchronous
async def test_the_anthropic_api_takes_keys_by_either_header(keyed: ServerConfig) -> None:
    """Its SDKs send `authorization` from version 2 on, and `x-api-key` before."""
    asked: Any = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
    async with echo_server(ECHO, config=keyed) as server:
        async with anthropic_sdk(server, ALICE) as alice, anthropic_sdk(server, "no key") as eve:
            assert (await alice.messages.count_tokens(**asked)).input_tokens > 0
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await eve.messages.create(**asked, max_tokens=1)
        assert caught.value.type == "authentication_error"
        request = post("/v1/messages/count_tokens", json.dumps(asked).encode(), f"x-api-key: {BOB}")
        assert (await exchange(server.http_port, request)).status == 200


def test_a_key_with_a_line_break_is_refused_at_the_client() -> None:
    for key in ("", "a\nb", "a b", "ä"):
        with pytest.raises(RequestError) as caught:
            Client("127.0.0.1:1", api_key=key)
        assert caught.value.field == "api_key"
        assert not key or key not in str(caught.value)
