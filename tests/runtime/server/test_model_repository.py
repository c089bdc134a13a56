"""Models that come and go while a server runs, as KServe's clients and a directory order it."""

import asyncio
import shutil
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.model_repository import add_engine, open_from, options_of, repository_server
from tests.support.servers import CONFIG, RunningServer, echo_server, greedy
from trtc.protos.errors import EnvironmentFault, TrtcError, UnavailableError, UnknownModelError
from trtc.protos.manifest import MANIFEST_FILE, Canary
from trtc.runtime.client import AsyncClient
from trtc.runtime.server.app import RepositoryConfig, Server
from trtc.runtime.service.exposition import Exposition

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # gevent warns about itself, and stubs are of an older protobuf
    import aiohttp
    import yarl

    pytest.importorskip("tritonclient.grpc", reason="make setup installs it")
    import tritonclient.grpc.aio
    import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

PROMPT = (5, 17, 9)
WRONG = Canary(prompt_ids=PROMPT, token_ids=(1, 1, 1, 1))


@asynccontextmanager
async def triton(server: RunningServer) -> AsyncIterator[Any]:
    async with tritonclient.grpc.aio.InferenceServerClient(server.address) as client:
        yield client


async def states(client: Any) -> dict[tuple[str, str], tuple[str, str]]:
    index = await client.get_model_repository_index()
    return {(one.name, one.version): (one.state, one.reason) for one in index.models}


async def tokens(client: AsyncClient, model: str, number: int = 12) -> list[int]:
    generation = client.generate(
        PROMPT, model=model, max_tokens=number, temperature=0.0, ignore_eos=True
    )
    return list((await generation.result()).token_ids)


def told(vocab_size: int, number: int = 12) -> list[int]:
    return greedy(PROMPT, number, options_of(vocab_size))


@asynchronous
async def test_models_are_loaded_listed_and_unloaded_by_order(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    add_engine(tmp_path / "b" / "3", 430)
    add_engine(tmp_path / "b" / "12", 440)
    (tmp_path / "b" / "13").mkdir()  # its manifest has not been written yet
    (tmp_path / "empty").mkdir()
    async with (
        repository_server(tmp_path, load=["a"]) as server,
        triton(server) as client,
        AsyncClient(server.address) as own,
    ):
        assert await client.is_server_ready()
        assert await states(client) == {
            ("a", "1"): ("READY", ""),
            ("b", ""): ("UNAVAILABLE", "not loaded"),
        }
        assert await tokens(own, "") == told(400)
        await client.load_model("b")
        assert await client.is_model_ready("b")
        assert await client.is_model_ready("b", "12")
        assert not await client.is_model_ready("b", "3")
        assert list((await client.get_model_metadata("b")).versions) == ["12"]
        assert await tokens(own, "b") == told(440)
        assert {one.name for one in await own.info()} == {"a", "b"}
        engine = server.handle("b")
        await client.load_model("b")  # nothing has changed
        assert server.handle("b") is engine
        await client.unload_model("a")
        with pytest.raises(UnknownModelError):
            await tokens(own, "a")
        assert await tokens(own, "") == told(440)
        assert await client.is_server_ready()
        await client.unload_model("a")  # it is not loaded
        await client.load_model("a")
        assert await tokens(own, "a") == told(400)
        metrics = Exposition(server.server.metrics).registry
        assert metrics.get_sample_value("trtc_engine_ready", {"model_name": "a"}) == 1
        loads = {"model_name": "a", "outcome": "loaded"}
        assert metrics.get_sample_value("trtc_model_loads_total", loads) == 2
        assert metrics.get_sample_value("trtc_model_unloads_total", {"model_name": "a"}) == 1


@asynchronous
async def test_streams_end_on_the_version_that_they_began_on(tmp_path: Path) -> None:
    add_engine(tmp_path / "m" / "1", 400)
    async with (
        repository_server(tmp_path, load=["m"]) as server,
        triton(server) as client,
        AsyncClient(server.address) as own,
    ):
        old = server.handle("m")
        running = [
            own.generate(PROMPT, model="m", max_tokens=300, temperature=0.0, ignore_eos=True)
            for _ in range(4)
        ]
        for one in running:
            await anext(aiter(one))
        add_engine(tmp_path / "m" / "2", 430)
        await client.load_model("m")
        assert await tokens(own, "m") == told(430)
        assert await states(client) == {
            ("m", "1"): ("UNLOADING", "its streams go on"),
            ("m", "2"): ("READY", ""),
        }
        assert old.loop.healthy()
        for one in running:
            assert list((await one.result()).token_ids) == told(400, 300)
        await eventually(lambda: not old.loop.healthy(), "the old engine is closed")
        assert list(await states(client)) == [("m", "2")]


@asynchronous
async def test_a_load_that_fails_leaves_what_was_served(tmp_path: Path) -> None:
    add_engine(tmp_path / "m" / "1", 400)
    async with (
        repository_server(tmp_path, load=["m"]) as server,
        triton(server) as client,
        AsyncClient(server.address) as own,
    ):
        for version, (damage, message) in enumerate(
            {
                "canary": "canary 0 gives other tokens",
                "manifest": "manifest.json",
                "digest": "digest",
            }.items(),
            start=2,
        ):
            path = add_engine(
                tmp_path / "m" / str(version), 430, [WRONG] if damage == "canary" else ()
            )
            manifest = path / MANIFEST_FILE
            if damage == "manifest":
                manifest.write_bytes(manifest.read_bytes()[:100])
            if damage == "digest":
                manifest.write_bytes(manifest.read_bytes().replace(b"430", b"431"))
            with pytest.raises(InferenceServerException, match=message):
                await client.load_model("m")
            assert await tokens(own, "m") == told(400)
            assert (await states(client))[("m", "1")] == ("READY", "")
            assert await client.is_server_ready()
        add_engine(tmp_path / "other", canaries=[WRONG])
        with pytest.raises(InferenceServerException, match="canary 0"):
            await client.load_model("other")
        state, reason = (await states(client))[("other", "")]
        assert state == "UNAVAILABLE"
        assert "canary 0" in reason
        assert await client.is_server_ready()  # it was not to be served at the start
        with pytest.raises(UnavailableError, match="canary 0"):
            await tokens(own, "other")
        await client.unload_model("other")
        assert (await states(client))[("other", "")] == ("UNAVAILABLE", "not loaded")


@pytest.mark.parametrize(
    "name", ["../m", "..", ".", "m/1", "/m", "", "m\n", ".hidden", "a" * 200, "none", "out", "nul"]
)
@asynchronous
async def test_names_lead_nowhere_else(name: str, tmp_path: Path) -> None:
    root = tmp_path / "models"
    add_engine(root / "m" / "1")
    add_engine(tmp_path / "m")
    (root / "out").symlink_to(tmp_path / "m")
    (root / "nul").write_bytes(b"\0")
    async with repository_server(root) as server, triton(server) as client:
        with pytest.raises(InferenceServerException) as refused:
            await client.load_model(name)
        expected = "FAILED_PRECONDITION" if name == "out" else "NOT_FOUND"
        assert refused.value.status() == f"StatusCode.{expected}"
        assert await states(client) == {
            (known, ""): ("UNAVAILABLE", "not loaded") for known in ("m", "out")
        }


@asynchronous
async def test_a_directory_is_followed(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    add_engine(tmp_path / "bad", canaries=[WRONG])
    async with (
        repository_server(tmp_path, poll_s=0.05) as server,
        triton(server) as client,
        AsyncClient(server.address) as own,
    ):
        models = server.server.models
        await eventually(lambda: models.is_ready("a"), "a serves")
        await eventually(lambda: "canary" in models.why_not_ready().get("bad", ""), "bad fails")
        assert not await client.is_server_ready()
        shutil.rmtree(tmp_path / "bad")
        await eventually(lambda: models.why_not_ready() == {}, "bad is forgotten")
        add_engine(tmp_path / "b" / "1", 430)
        await eventually(lambda: models.is_ready("b"), "b serves")
        add_engine(tmp_path / "a", 440)
        await eventually(lambda: models.engine("a").manifest.model.vocab_size == 440, "a is new")
        assert await tokens(own, "a") == told(440)
        add_engine(tmp_path / "b" / "2", 450, [WRONG])
        failed = {"model_name": "b", "outcome": "failed"}
        registry = Exposition(server.server.metrics).registry
        await eventually(
            lambda: registry.get_sample_value("trtc_model_loads_total", failed) == 1, "b/2 fails"
        )
        assert await tokens(own, "b") == told(430)
        add_engine(tmp_path / "b" / "2", 450)
        await eventually(lambda: models.engine("b").version == "2", "b/2 serves")
        shutil.rmtree(tmp_path / "a")
        await eventually(lambda: "a" not in models.names, "a is unloaded")
        for order in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="--explicit"):
                await order("b")


@asynchronous
async def test_an_engine_that_does_not_fit_is_refused_by_the_numbers(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    add_engine(tmp_path / "b", 430)
    async with repository_server(tmp_path, load=["a"]) as server, triton(server) as client:
        held = server.handle("a").num_pages * server.handle("a").manifest.ledger.page
        with pytest.raises(InferenceServerException) as refused:
            await client.load_model("b", config='{"max_batch_size": 1}')
        assert "config: is not known" in str(refused.value)
        control = server.server.control
        with pytest.raises(EnvironmentFault) as error:
            await control.load("b", kv_bytes=10**15)
        assert "b needs 1000000.00 GB of the host's memory" in str(error.value)
        assert f"held by: a {held / 1e6:.2f} MB" in str(error.value)
        assert (await states(client))[("b", "")][0] == "UNAVAILABLE"
        await control.load("b")
        with pytest.raises(EnvironmentFault):
            await control.load("b", kv_bytes=10**15)
        assert await client.is_model_ready("b")


@asynchronous
async def test_running_requests_end_before_their_model_and_late_ones_are_ended(
    tmp_path: Path,
) -> None:
    add_engine(tmp_path / "m", 400)
    config = replace(CONFIG, drain_timeout_s=0.2)
    async with (
        repository_server(tmp_path, load=["m"], config=config) as server,
        AsyncClient(server.address) as own,
    ):
        short = own.generate(PROMPT, model="m", max_tokens=30, temperature=0.0, ignore_eos=True)
        long = own.generate(PROMPT, model="m", max_tokens=900, temperature=0.0, ignore_eos=True)
        for one in (short, long):
            await anext(aiter(one))
        unloading = asyncio.create_task(server.server.control.unload("m"))
        await eventually(lambda: bool(server.server.models.get("m")), "it is being unloaded")
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="being unloaded"):
            await tokens(own, "m")
        assert list((await short.result()).token_ids) == told(400, 30)
        with pytest.raises(UnavailableError, match="stopped"):
            await long.result()
        await unloading
        assert server.server.models.names == ()


@asynchronous
async def test_a_load_goes_on_when_its_caller_leaves(tmp_path: Path) -> None:
    add_engine(tmp_path / "m", 400)
    async with repository_server(tmp_path) as server:
        loading = asyncio.create_task(server.server.control.load("m"))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await eventually(lambda: server.server.models.is_ready("m"), "it is loaded")


@asynchronous
async def test_engines_of_a_command_line_can_be_unloaded_and_loaded_again() -> None:
    async with echo_server(names=("a", "b")) as server:
        await server.server.control.unload("a")
        index = {one.name: one.reason for one in await server.server.control.index()}
        assert index == {"a": "not loaded", "b": ""}
        with pytest.raises(UnknownModelError):
            await server.server.control.unload("c")
        with pytest.raises(TrtcError):  # an echo has no directory
            await server.server.control.load("a")


@asynchronous
async def test_tritonclient_orders_the_same_over_http(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    async with (
        repository_server(tmp_path) as server,
        tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client,
    ):
        assert await client.is_server_ready()
        await client.load_model("a")
        assert await client.is_model_ready("a", "1")
        assert await client.get_model_repository_index() == [
            {"name": "a", "version": "1", "state": "READY", "reason": ""}
        ]
        await client.unload_model("a")
        (entry,) = await client.get_model_repository_index()
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "not loaded")
        for call, name, message in (
            (client.load_model, ".a", "Names are letters"),
            (client.load_model, "b", "Choose one of: a"),
            (client.unload_model, "b", "no engine is called 'b'"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                await call(name)
        with pytest.raises(InferenceServerException, match=r"parameters\.config: is not known"):
            await client.load_model("a", config="{}")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("a/load", b'{"parameters": {"kv_bytes": 1000000}}', 200),
        ("a/load", b"", 200),
        ("a/load", b'{"parameters": {"kv_bytes": true}}', 400),
        ("a/load", b'{"parameters": {"kv_bytes": -1}}', 400),
        ("a/load", b'{"parameters": {"kv_bytes": 1e30}}', 400),
        ("a/load", b'{"parameters": {"kv_bytes": 1000000000000000}}', 503),
        ("a/load", b'{"parameters": []}', 400),
        ("a/load", b"{", 400),
        ("a/unload", b'{"parameters": {"unload_dependents": true}}', 200),
        ("a/unload", b'{"parameters": {"now": true}}', 400),
        ("a", b"", 404),
        ("a/b/load", b"", 404),
        ("a/reload", b"", 404),
        ("%2e%2e%2fa/load", b"", 404),
    ],
)
@asynchronous
async def test_orders_over_http(path: str, body: bytes, status: int, tmp_path: Path) -> None:
    root = tmp_path / "models"
    add_engine(root / "a")
    add_engine(tmp_path / "a")
    async with (
        repository_server(root) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
        session.post(yarl.URL(f"/v2/repository/models/{path}", encoded=True), data=body) as answer,
    ):
        assert answer.status == status, await answer.text()


@asynchronous
async def test_pages_of_the_web_give_no_orders(tmp_path: Path) -> None:
    add_engine(tmp_path / "a")
    headers = {"origin": "http://evil.example", "content-type": "text/plain"}
    async with (
        repository_server(tmp_path) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
        session.post("/v2/repository/models/a/load", data=b"", headers=headers) as answer,
    ):
        assert answer.status == 415
        assert server.server.models.names == ()


@asynchronous
async def test_a_server_that_is_told_twice_to_end_waits_for_no_unload(tmp_path: Path) -> None:
    add_engine(tmp_path / "m", 400)
    add_engine(tmp_path / "n", 430)
    repository = RepositoryConfig(tmp_path, load=("m",))
    server = Server(replace(CONFIG, engines=(), repository=repository), opener=open_from)
    await server.start()
    async with AsyncClient(server.frontends["grpc"].address) as own:
        long = own.generate(PROMPT, model="m", max_tokens=1000, temperature=0.0, ignore_eos=True)
        await anext(aiter(long))
        unloading = asyncio.create_task(server.control.unload("m"))
        loading = asyncio.create_task(server.control.load("n"))
        await eventually(lambda: not server.models.is_ready("m"), "it is being unloaded")
        server.stop()
        server.stop()
        ending = asyncio.create_task(server.close())
        with pytest.raises(UnavailableError, match="stopped"):
            await long.result()
        await ending
        await asyncio.gather(unloading, loading)
