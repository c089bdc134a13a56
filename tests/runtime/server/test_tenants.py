"""Tenants of a real server: their limits, and a greedy one beside a modest one."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from tests.support.aio import asynchronous, eventually
from tests.support.servers import CONFIG, EchoEngine, RunningServer, echo_server
from trtc.protos.errors import ForbiddenError, InvalidRequestError, NoTokenizerError, QueueFullError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.asgi import error_headers, http_status
from trtc.runtime.service.access import AccessConfig
from trtc.runtime.service.api_keys import ApiKey, KeyFile, Tenant, hash_of


def write_tenants(path: Path, tenants: Mapping[str, Tenant]) -> None:
    """Tenants whose key is their name."""
    named = {
        name: msgspec.structs.replace(one, keys=(ApiKey(name, hash_of(name)),))
        for name, one in tenants.items()
    }
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(KeyFile(tenants=named)))
    new.replace(path)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, engine: EchoEngine | None = None, /, **tenants: Tenant
) -> AsyncIterator[RunningServer]:
    path = folder / "keys.json"
    write_tenants(path, tenants)
    config = replace(CONFIG, access=AccessConfig(path))
    async with echo_server(engine, config=config, names=("echo", "other")) as server:
        yield server


def client(server: RunningServer, name: str) -> AsyncClient:
    return AsyncClient(server.address, api_key=name, timeout=30)


async def ask(client: AsyncClient, prompt: int = 1, max_tokens: int = 1, priority: int = 0) -> int:
    """The number of new tokens."""
    generation = client.generate(
        [5] * prompt, model="echo", max_tokens=max_tokens, ignore_eos=True, priority=priority
    )
    return len((await generation.result()).token_ids)


@asynchronous
async def test_over_quota_says_how_long_to_wait(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, alice=Tenant(requests_per_minute=2), bob=Tenant()) as server,
        client(server, "alice") as alice,
        client(server, "bob") as bob,
    ):
        await ask(alice)
        with pytest.raises(NoTokenizerError):  # a request too
            await alice.detokenize([1], model="echo")
        with pytest.raises(QueueFullError, match="2 requests a minute") as caught:
            await ask(alice)
        assert caught.value.retry_after_s == pytest.approx(30, abs=2)
        await ask(bob)

        async with grpc.aio.insecure_channel(server.address) as channel:
            request = pb.GenerateRequest(
                model="echo", token_ids=pb.TokenIds(ids=[1]), max_tokens=1
            ).SerializeToString()
            method = channel.unary_stream("/trtc.v1.Inference/Generate", None, None)
            call = method(request, metadata=(("x-api-key", "alice"),))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            metadata = dict(await call.trailing_metadata())
            status = Status.FromString(metadata["grpc-status-details-bin"])
            info = RetryInfo()
            assert any(detail.Unpack(info) for detail in status.details)
            assert 25 < info.retry_delay.ToTimedelta().total_seconds() <= 30

        write_tenants(tmp_path / "keys.json", {"alice": Tenant(requests_per_minute=100_000)})
        with pytest.raises(QueueFullError, match="100000") as caught:
            await ask(alice)  # from now on
        await asyncio.sleep(0.01)
        await ask(alice)


@asynchronous
async def test_openai_says_it_too_and_lists_the_tenants_models(tmp_path: Path) -> None:
    def call(path: str, body: object = None) -> tuple[int, Mapping[str, str], Any]:
        url = f"http://127.0.0.1:{port}{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": "Bearer alice", "content-type": "application/json"}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, dict(answer.headers), json.load(answer)

    limits = Tenant(requests_per_minute=1, models=("echo",))
    completion = {"model": "echo", "prompt": [1], "max_tokens": 1, "return_token_ids": True}
    async with serving(tmp_path, alice=limits) as server:
        port = server.http_port
        status, _, models = await asyncio.to_thread(call, "/v1/models")
        assert (status, [one["id"] for one in models["data"]]) == (200, ["echo"])
        assert (await asyncio.to_thread(call, "/v1/models/other"))[0] == 403
        assert (await asyncio.to_thread(call, "/v1/completions", completion))[0] == 200
        status, headers, refusal = await asyncio.to_thread(call, "/v1/completions", completion)
        assert status == 429
        assert 55 < int(headers["retry-after"]) <= 60
        assert "1 requests a minute" in refusal["error"]["message"]


@pytest.mark.parametrize(("seconds", "header"), [(0.2, b"1"), (1.0, b"1"), (29.1, b"30")])
def test_http_says_it_in_whole_seconds(seconds: float, header: bytes) -> None:
    error = QueueFullError("", retry_after_s=seconds)
    assert (http_status(error), error_headers(error)) == (429, [(b"retry-after", header)])
    assert error_headers(QueueFullError("")) == []


@asynchronous
async def test_tokens_of_prompts_and_completions_count(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, alice=Tenant(tokens_per_minute=200)) as server,
        client(server, "alice") as alice,
    ):
        assert await ask(alice, prompt=60, max_tokens=200) == 200  # 60 more than there were
        with pytest.raises(QueueFullError, match="200 tokens a minute") as caught:
            await ask(alice)
        assert caught.value.retry_after_s == pytest.approx(18, abs=2)
        await server.idle()


@asynchronous
async def test_streams_context_and_models_are_the_tenants_own(tmp_path: Path) -> None:
    limits = Tenant(max_streams=1, max_context=100, models=("echo",))
    slow = EchoEngine(EchoOptions(step_s=0.005))
    async with (
        serving(tmp_path, slow, alice=limits, bob=Tenant()) as server,
        client(server, "alice") as alice,
        client(server, "bob") as bob,
    ):
        with pytest.raises(ForbiddenError, match="may not use 'other'"):
            await alice.generate([1], model="other").result()
        with pytest.raises(ForbiddenError):
            await alice.info("other")
        assert [one.name for one in await alice.info()] == ["echo"]
        assert [one.name for one in await bob.info()] == ["echo", "other"]
        with pytest.raises(InvalidRequestError, match="at most 90"):
            await ask(alice, prompt=10, max_tokens=91)
        with pytest.raises(InvalidRequestError, match="context length is 100"):
            await ask(alice, prompt=100)
        fitting = await alice.generate([5] * 40, model="echo", ignore_eos=True).result()
        assert len(fitting.token_ids) == 60
        assert await ask(bob, prompt=100, max_tokens=100) == 100

        running = alice.generate([5], model="echo", max_tokens=90, ignore_eos=True)
        await anext(aiter(running))
        with pytest.raises(QueueFullError, match="1 open streams") as caught:
            await ask(alice)
        assert caught.value.retry_after_s == 1.0
        await running.result()
        await ask(alice)


@asynchronous
async def test_another_salt_makes_what_was_cached_unreachable(tmp_path: Path) -> None:
    prompt = list(range(40, 104))

    async with serving(tmp_path, alice=Tenant()) as server, client(server, "alice") as alice:

        async def cached(salt: str = "") -> int:
            generation = alice.generate(prompt, model="echo", max_tokens=1, cache_salt=salt)
            usage = (await generation.result()).usage
            return usage.cached_prompt_tokens

        assert [await cached(), await cached("x")] == [0, 0]
        assert min(await cached(), await cached("x")) > 0
        write_tenants(tmp_path / "keys.json", {"alice": Tenant(cache_salt="2026")})
        assert [await cached(), await cached("x")] == [0, 0]


@asynchronous
async def test_a_tenant_of_a_higher_class_goes_first(tmp_path: Path) -> None:
    narrow = EchoEngine(EchoOptions(step_s=0.01, max_batch_size=1))
    tenants = {"batch": Tenant(priority=-5), "chat": Tenant()}
    async with (
        serving(tmp_path, narrow, **tenants) as server,
        client(server, "batch") as batch,
        client(server, "chat") as chat,
    ):
        ended: list[str] = []

        async def run(name: str, client: AsyncClient) -> None:
            await ask(client, max_tokens=8)
            ended.append(name)

        loop = server.handle().loop
        first = chat.generate([5], model="echo", max_tokens=1000, ignore_eos=True)
        await anext(first)
        waiting = [asyncio.create_task(run("batch", batch)) for _ in range(4)]
        await eventually(lambda: loop.stats().waiting == 4, "those of a low class wait")
        waiting += [asyncio.create_task(run("chat", chat)) for _ in range(4)]
        await eventually(lambda: loop.stats().waiting == 8, "all wait")
        first.cancel()
        await asyncio.gather(*waiting)
        assert ended == ["chat"] * 4 + ["batch"] * 4
        with pytest.raises(InvalidRequestError, match="grants at most 0"):
            await ask(chat, priority=1)


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
@asynchronous
async def test_a_modest_tenant_gets_its_share_beside_a_greedy_one(
    weight: float, share: float, tmp_path: Path
) -> None:
    """Behind a third one's requests the greedy one has 100 waiting over ten connections, the modest
    one 30 that came last, over one. As long as both wait, lanes are theirs by weight."""
    # Steps enough for a slow machine to send 130 requests meanwhile.
    engine = EchoEngine(
        EchoOptions(max_batch_size=8, step_s=0.005, max_seq_len=8192, num_pages=4096)
    )
    answered: list[str] = []

    async def run(name: str, client: AsyncClient) -> None:
        await ask(client, prompt=4, max_tokens=8)
        answered.append(name)

    tenants = {"first": Tenant(), "greedy": Tenant(), "modest": Tenant(weight=weight)}
    async with (
        serving(tmp_path, engine, **tenants) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        first = await stack.enter_async_context(client(server, "first"))
        holding = [asyncio.create_task(ask(first, max_tokens=4000)) for _ in range(8)]
        await eventually(lambda: server.handle().loop.stats().running == 8, "lanes are taken")
        asking = []
        for name, connections, requests in (("greedy", 10, 10), ("modest", 1, 30)):
            for _ in range(connections):
                one = await stack.enter_async_context(client(server, name))
                asking += [asyncio.create_task(run(name, one)) for _ in range(requests)]
        await eventually(lambda: server.handle().loop.stats().waiting >= 120, "the others wait")
        begin = len(answered)
        for task in holding:
            task.cancel()
        await asyncio.gather(*asking, *holding, return_exceptions=True)
    assert len(answered) == 130
    while_both_wait = answered[begin : begin + 32]
    assert abs(while_both_wait.count("modest") / 32 - share) <= 0.15
