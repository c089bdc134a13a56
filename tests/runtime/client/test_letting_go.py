"""A generation that nobody holds any more ends, wherever it runs."""

import asyncio
import gc
from pathlib import Path

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import EOS, EchoEngine, RunningServer, echo_server, manifest
from trtc.runtime.client import AsyncClient, Client
from trtc.runtime.engine.session import Session
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.request import FinishReason, Output

SLOW = EchoOptions(step_s=0.01, never=(EOS,), num_pages=4096, max_seq_len=8192)
LONG = 8000
"""Tokens; 80 s at SLOW's pace, far longer than any wait here."""
DROPPED = 50


async def all_begin(server: RunningServer) -> None:
    stats = server.handle().loop.stats
    await eventually(lambda: stats().running + stats().waiting == DROPPED, "50 requests are live")


@asynchronous
async def test_fifty_dropped_asynchronous_generations_end() -> None:
    async with echo_server(EchoEngine(SLOW)) as server, AsyncClient(server.address) as client:
        generations = [client.generate([1], max_tokens=LONG) for _ in range(DROPPED)]
        await all_begin(server)
        del generations
        await server.idle()
        assert server.handle().loop.stats().requests_finished == DROPPED


@asynchronous
async def test_a_loop_that_is_left_ends_its_generation() -> None:
    async def leave_by_break(client: AsyncClient) -> None:
        async for _ in client.generate([1], max_tokens=LONG):
            break

    async def leave_by_error(client: AsyncClient) -> None:
        async for _ in client.generate([1], max_tokens=LONG):
            raise KeyError("the caller's own")

    async def read(client: AsyncClient) -> None:
        await client.generate([1], max_tokens=LONG).result()

    async with echo_server(EchoEngine(SLOW)) as server, AsyncClient(server.address) as client:
        await leave_by_break(client)
        await server.idle()
        with pytest.raises(KeyError):
            await leave_by_error(client)
        await server.idle()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(client), timeout=0.1)
        await server.idle()


@asynchronous
async def test_fifty_dropped_blocking_generations_end() -> None:
    async with echo_server(EchoEngine(SLOW)) as server:
        with Client(server.address) as client:
            generations = [client.generate([1], max_tokens=LONG) for _ in range(DROPPED)]
            await all_begin(server)
            del generations
            await server.idle()


def local_engine() -> LocalEngine:
    executor = EchoExecutor(SLOW)
    return LocalEngine(
        Session(
            path=Path("echo"),
            manifest=manifest(EchoEngine(SLOW), executor),
            executor=executor,
            tokenizer=None,
        )
    )


@asynchronous
async def test_dropped_generations_of_an_engine_in_this_process_end() -> None:
    with local_engine() as engine:
        generations = [engine.generate([1], max_tokens=LONG) for _ in range(DROPPED)]
        del generations
        gc.collect()
        await eventually(lambda: engine.stats().requests_finished == DROPPED, "all have ended")


def test_leaving_a_generation_spares_a_newer_request_of_the_same_id() -> None:
    with local_engine() as engine:
        older = engine.generate([1], max_tokens=1, request_id="again")
        older.result()
        newer = engine.generate([1], max_tokens=30, request_id="again")
        with older:
            first: Output = next(newer)
        assert first.request_id == "again"
        assert newer.result().finish_reason is FinishReason.LENGTH
