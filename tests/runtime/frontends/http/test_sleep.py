"""Models that give their memory back for a while: vLLM's routes, and what requests are told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.model_repository import (
    FAULT,
    NO_WEIGHTS,
    add_engine,
    options_of,
    repository_server,
)
from tests.support.servers import RunningServer, greedy
from trtc.protos.errors import UnavailableError
from trtc.runtime.client import AsyncClient
from trtc.runtime.service.exposition import Exposition

PROMPT = (5, 17, 9)


class Operator:
    """Asks a server over HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self._session.post(path, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(path) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def operator(server: RunningServer) -> AsyncIterator[Operator]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session:
        yield Operator(session)


async def tokens(client: AsyncClient, model: str) -> list[int]:
    generation = client.generate(
        PROMPT, model=model, max_tokens=12, temperature=0.0, ignore_eos=True
    )
    return list((await generation.result()).token_ids)


def told(vocab_size: int, number: int = 12) -> list[int]:
    return greedy(PROMPT, number, options_of(vocab_size))


@pytest.mark.parametrize("level", [1, 2])
@asynchronous
async def test_a_model_sleeps_and_wakes_as_it_was(level: int, tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    add_engine(tmp_path / "b", 430)
    async with (
        repository_server(tmp_path, load=["a", "b"]) as server,
        operator(server) as http,
        AsyncClient(server.address) as own,
    ):
        old = server.handle("a")
        assert await http.get("/is_sleeping") == (200, {"is_sleeping": False, "models": {}})
        status, answer = await http.post(f"/sleep?level={level}&model=a")
        assert status == 200
        (slept,) = answer["slept"]
        assert slept.pop("seconds") >= 0
        claim = old.num_pages * old.manifest.ledger.page
        kept = 1000 if level == 1 else 0
        assert slept == {"model": "a", "level": level, "freed_bytes": claim, "kept_bytes": kept}
        assert not old.loop.healthy()
        asleep = {"is_sleeping": True, "models": {"a": level}}
        assert await http.get("/is_sleeping") == (200, asleep)
        assert await http.get("/is_sleeping?model=b") == (200, {"is_sleeping": False, "models": {}})
        with pytest.raises(UnavailableError, match=rf"it is asleep \(level {level}\)"):
            await tokens(own, "a")
        completion = {"model": "a", "prompt": [5], "max_tokens": 1}
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{server.http_port}") as session,
            session.post("/v1/completions", json=completion) as refused,
        ):
            assert refused.status == 503
        assert (await http.get("/readyz"))[0] == 503
        assert (await http.get("/healthz"))[0] == 200
        assert await tokens(own, "b") == told(430)
        states = ("awake", "weights_offloaded", "discard_all")
        registry = Exposition(server.server.metrics).registry
        assert [
            registry.get_sample_value(
                "trtc_engine_sleep_state", {"model_name": "a", "sleep_state": state}
            )
            for state in states
        ] == [float(at == level) for at in range(3)]
        assert await http.post("/sleep?level=1&model=a") == (200, {"slept": []})
        status, answer = await http.post("/wake_up")
        assert status == 200
        assert [one["model"] for one in answer["woken"]] == ["a"]
        assert server.handle("a").num_pages == old.num_pages
        assert await tokens(own, "a") == told(400)
        assert (await http.get("/readyz"))[0] == 200
        assert await http.post("/wake_up") == (200, {"woken": []})


@asynchronous
async def test_running_requests_end_first_or_are_ended(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    async with (
        repository_server(tmp_path, load=["a"]) as server,
        operator(server) as http,
        AsyncClient(server.address) as own,
    ):

        def generation(max_tokens: int) -> Any:
            return own.generate(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

        waited = generation(200)
        await anext(aiter(waited))
        assert (await http.post("/sleep"))[0] == 200
        assert list((await waited.result()).token_ids) == told(400, 200)
        await http.post("/wake_up")
        ended = generation(900)
        await anext(aiter(ended))
        assert (await http.post("/sleep?mode=abort"))[0] == 200
        with pytest.raises(UnavailableError, match="stopped"):
            await ended.result()
        await http.post("/wake_up")
        assert await tokens(own, "") == told(400)
        await server.idle("a")


@asynchronous
async def test_a_model_that_cannot_wake_stays_asleep(tmp_path: Path) -> None:
    path = add_engine(tmp_path / "a", 400)
    async with (
        repository_server(tmp_path, load=["a"]) as server,
        operator(server) as http,
        AsyncClient(server.address) as own,
    ):
        await http.post("/sleep")
        (path / FAULT).touch()
        assert (await http.post("/wake_up"))[0] == 503
        (path / FAULT).unlink()
        assert (await http.get("/is_sleeping"))[1]["is_sleeping"]
        add_engine(path, 440)
        assert (await http.post("/wake_up"))[0] == 503  # it is not the one that went to sleep
        control = server.server.control
        await control.load("a")
        assert await tokens(own, "a") == told(440)
        assert not (await http.get("/is_sleeping"))[1]["is_sleeping"]
        await http.post("/sleep?level=2")
        await control.unload("a")
        assert await http.get("/is_sleeping") == (200, {"is_sleeping": False, "models": {}})
        assert server.server.models.names == ()


@asynchronous
async def test_weights_that_cannot_be_had_are_dropped_or_nothing_happens(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    (add_engine(tmp_path / "b", 430) / NO_WEIGHTS).touch()
    async with (
        repository_server(tmp_path, load=["a", "b"]) as server,
        operator(server) as http,
        AsyncClient(server.address) as own,
    ):
        status, answer = await http.post("/sleep?level=1")
        assert status == 400
        assert "b, for cpu:echo, cannot have its weights in the host's memory" in answer["status"]
        assert await tokens(own, "a") == told(400)
        status, answer = await http.post("/sleep?level=2")
        assert [one["model"] for one in answer["slept"]] == ["a", "b"]
        await http.post("/wake_up?model=b")
        assert await tokens(own, "b") == told(430)


@asynchronous
async def test_a_directory_that_is_followed_wakes_nobody(tmp_path: Path) -> None:
    add_engine(tmp_path / "a" / "1", 400)
    async with (
        repository_server(tmp_path, poll_s=0.02) as server,
        operator(server) as http,
        AsyncClient(server.address) as own,
    ):
        await http.post("/sleep")
        add_engine(tmp_path / "a" / "2", 430)
        await asyncio.sleep(0.2)
        assert server.server.models.engines == {}
        await http.post("/wake_up")
        await eventually(lambda: server.handle("a").version == "2", "the new version is loaded")
        assert await tokens(own, "a") == told(430)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/sleep?level=3", "level: is '3'"),
        ("/sleep?level=", "level: is ''"),
        ("/sleep?mode=now", "mode: is 'now'"),
        ("/sleep?tags=weights", "tags: is not known"),
        ("/sleep?level=1&level=2", "level: is given twice"),
        ("/sleep?" + "x" * 5000, "is not known"),
        ("/wake_up?level=1", "level: is not known"),
        ("/sleep?model=b", "no engine is called 'b'"),
    ],
)
@asynchronous
async def test_bad_orders(path: str, said: str, tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    async with repository_server(tmp_path, load=["a"]) as server, operator(server) as http:
        status, answer = await http.post(path)
        assert status == (404 if "called" in said else 400)
        assert said in answer["status"]
        assert server.server.models.is_ready("a")


@asynchronous
async def test_pages_of_the_web_put_nobody_to_sleep(tmp_path: Path) -> None:
    add_engine(tmp_path / "a", 400)
    async with repository_server(tmp_path, load=["a"]) as server, operator(server) as http:
        assert (await http.post("/sleep", origin="http://evil.example"))[0] == 400
        assert server.server.models.is_ready("a")
