"""Who may know of models and ask them, by KServe's protocol and SMG's."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest

from tests.support.aio import asynchronous
from tests.support.openai_sdk import ECHO
from tests.support.servers import CONFIG, echo_server
from tests.support.tensors import tensors
from tests.support.triton_client import input_of
from trtc.protos.errors import ForbiddenError
from trtc.runtime.requests.principal import Scope
from trtc.runtime.server.app import ServerConfig
from trtc.runtime.service.access import Access, AccessConfig, Peer
from trtc.runtime.service.api_keys import ApiKey, KeyFile, Tenant, hash_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # gevent warns about itself
    import aiohttp
    import tritonclient.grpc.aio

ALICE, OPERATOR, DEPLOYER = "alice's", "the operator's", "the deployer's"


@pytest.fixture
def keyed(tmp_path: Path) -> ServerConfig:
    """Alice may use the engine `a`; the operator all, and read metrics."""

    def tenant(key: str, scopes: tuple[Scope, ...], models: tuple[str, ...] | None) -> Tenant:
        return Tenant(keys=(ApiKey(hash_of(key)[:8], hash_of(key)),), scopes=scopes, models=models)

    tenants = {
        "alice": tenant(ALICE, (Scope.INFERENCE,), ("a",)),
        "operator": tenant(OPERATOR, (Scope.INFERENCE, Scope.METRICS), None),
        "deployer": tenant(DEPLOYER, (Scope.ADMIN,), ("a",)),
    }
    path = tmp_path / "keys.json"
    path.write_bytes(msgspec.json.encode(KeyFile(tenants=tenants)))
    return replace(CONFIG, access=AccessConfig(path))


INPUTS = tensors(input_ids=[1], request_output_len=2)


@asynchronous
async def test_tritonclient_is_told_of_what_its_key_may_use(keyed: ServerConfig) -> None:
    async with (
        echo_server(names=("a", "b"), config=keyed) as server,
        tritonclient.grpc.aio.InferenceServerClient(server.address) as client,
    ):
        inputs = [input_of(name, array) for name, array in INPUTS.items()]

        async def asking(call: Callable[..., Any], *arguments: Any, key: str = ALICE) -> Any:
            return await call(*arguments, headers={"authorization": f"Bearer {key}"})

        assert (await asking(client.infer, "a", inputs)).as_numpy("output_ids").shape == (1, 1, 2)
        assert await asking(client.is_model_ready, "a")
        assert not await asking(client.is_model_ready, "b")
        assert [one.name for one in (await asking(client.get_model_repository_index)).models] == [
            "a"
        ]
        for call, *arguments in (
            (client.infer, "b", inputs),
            (client.get_model_metadata, "b"),
            (client.get_model_config, "b"),
            (client.get_inference_statistics, "a"),
            (client.get_inference_statistics,),
        ):
            with pytest.raises(Exception, match="PERMISSION_DENIED"):
                await asking(call, *arguments)
        told = await asking(client.get_inference_statistics, key=OPERATOR)
        assert [one.name for one in told.model_stats] == ["a", "b"]
        assert await client.is_server_live() and await client.is_server_ready()
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            await client.get_server_metadata()
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            await client.infer("a", inputs)

        async def requests() -> Any:
            yield {"model_name": "a", "inputs": inputs}

        stream = client.stream_infer(requests(), headers={"authorization": f"Bearer {ALICE}"})
        assert [error for _, error in [one async for one in stream]] == [None]


@asynchronous
async def test_http_is_told_the_same(keyed: ServerConfig) -> None:
    async with (
        echo_server(names=("a", "b"), config=keyed) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
    ):

        async def status(method: str, path: str, key: str = "") -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            body = {"input_ids": [1], "max_tokens": 2} if method == "POST" else None
            async with session.request(method, path, json=body, headers=headers) as response:
                return response.status

        assert await status("GET", "/v2/health/live") == 200
        assert await status("GET", "/v2/health/ready") == 200
        assert await status("GET", "/v2") == 401
        assert await status("POST", "/v2/models/a/generate") == 401
        assert await status("POST", "/v2/models/a/generate", ALICE) == 200
        assert await status("POST", "/v2/models/b/generate", ALICE) == 403
        assert await status("GET", "/v2/models/b", ALICE) == 403
        assert await status("GET", "/v2/models/b/ready", ALICE) == 400
        for path in ("/v2/models/stats", "/v2/models/a/stats"):
            assert await status("GET", path, ALICE) == 403
            assert await status("GET", path, OPERATOR) == 200


@asynchronous
async def test_ollamas_clients_and_tgis_are_told_the_same(keyed: ServerConfig) -> None:
    async with (
        echo_server(ECHO, names=("a", "b"), config=keyed) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
    ):

        async def ask(method: str, path: str, key: str = "", **body: Any) -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with session.request(method, path, json=body, headers=headers) as response:
                return response.status, await response.json()

        for path in ("/api/tags", "/api/ps"):
            assert (await ask("GET", path))[0] == 401
            status, told = await ask("GET", path, ALICE)
            assert (status, [one["name"] for one in told["models"]]) == (200, ["a"])
        text = {"stream": False, "options": {"num_predict": 2}}
        for path, body in (
            ("/api/show", {}),
            ("/api/generate", {}),
            ("/api/generate", {"prompt": "x", **text}),
            ("/api/chat", {"messages": [{"role": "user", "content": "x"}], **text}),
            ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2}}),
            ("/", {"inputs": "x", "parameters": {"max_new_tokens": 2}}),
        ):
            assert (await ask("POST", path, model="a", **body))[0] == 401, path
            assert (await ask("POST", path, ALICE, model="a", **body))[0] == 200, path
            assert (await ask("POST", path, ALICE, model="b", **body))[0] == 403, path


@asynchronous
async def test_smg_is_refused_without_a_key(keyed: ServerConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
        stubs = pytest.importorskip("smg_grpc_proto", reason="make setup installs it")
    pb = stubs.trtllm_service_pb2
    for name, code in (("a", grpc.StatusCode.OK), ("b", grpc.StatusCode.PERMISSION_DENIED)):
        async with (
            echo_server(names=(name,), config=keyed) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            stub = stubs.trtllm_service_pb2_grpc.TrtllmServiceStub(channel)
            metadata = (("authorization", f"Bearer {ALICE}"),)
            call = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)
            assert await call.code() is code
            call = stub.GetModelInfo(pb.GetModelInfoRequest())
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await stub.HealthCheck(pb.HealthCheckRequest())


@asynchronous
async def test_models_go_by_order_of_a_key_that_may(keyed: ServerConfig) -> None:
    async with (
        echo_server(names=("a", "b"), config=keyed) as server,
        tritonclient.grpc.aio.InferenceServerClient(server.address) as client,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
    ):
        for key, said in (("", "UNAUTHENTICATED"), (OPERATOR, "PERMISSION_DENIED.*'admin'")):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            with pytest.raises(Exception, match=said):
                await client.unload_model("a", headers=headers)
            async with session.post("/v2/repository/models/a/unload", headers=headers) as answer:
                assert answer.status == (403 if key else 401)
        headers = {"authorization": f"Bearer {DEPLOYER}"}
        with pytest.raises(Exception, match="may not use 'b'"):
            await client.unload_model("b", headers=headers)
        assert list(server.server.models.names) == ["a", "b"]
        await client.unload_model("a", headers=headers)
        assert list(server.server.models.names) == ["b"]


def test_without_keys_models_go_by_order_of_this_machine_alone() -> None:
    access = Access(AccessConfig())
    for ip in ("127.0.0.1", "::1", "127.8.8.8", "unix"):
        access.admit(Peer("x", ip), Scope.ADMIN)
    for ip in ("192.0.2.1", "::", "2001:db8::1", "unknown", "localhost"):
        with pytest.raises(ForbiddenError, match="this machine"):
            access.admit(Peer("x", ip), Scope.ADMIN)
        with pytest.raises(ForbiddenError, match="this machine"):
            access.admit(Peer("x", ip, subject="CN=a client"), Scope.ADMIN)
        access.admit(Peer("x", ip), Scope.INFERENCE)
