"""Clients that ask for too much, or do not take what they asked for."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import CONFIG, EOS, EchoEngine, echo_server, greedy
from trtc.protos.errors import InvalidRequestError, QueueFullError, TrtcError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc.servicer import InferenceServicer
from trtc.runtime.service.exposition import Exposition
from trtc.runtime.service.limits import ServiceLimits

GENERATE = "/trtc.v1.Inference/Generate"
# A client whose window for one stream is as small as HTTP/2 allows it to stay.
NARROW = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))


def long_request(number: int, max_tokens: int, logprobs: int = 20) -> pb.GenerateRequest:
    """With log-probabilities each token takes some 200 bytes, so windows fill soon."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[number]),
        max_tokens=max_tokens,
        logprobs=logprobs,
        ignore_eos=True,
    )


def raw_generate(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(
        GENERATE,
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )


@asynchronous
async def test_a_client_that_never_reads_loses_its_request_and_stalls_nobody() -> None:
    engine = EchoEngine(EchoOptions(num_pages=1024, max_seq_len=8192, step_s=0.0002, never=(EOS,)))
    config = replace(CONFIG, limits=ServiceLimits(max_unread_tokens=64))
    async with (
        echo_server(engine, config=config) as server,
        grpc.aio.insecure_channel(server.address, options=NARROW) as channel,
        AsyncClient(server.address) as client,
    ):
        generate = raw_generate(channel)
        stuck = [generate(long_request(number, 8000)) for number in range(4)]
        result = await client.generate([9], max_tokens=40, temperature=0.0).result()
        assert list(result.token_ids) == greedy([9], 40, engine.options)
        await server.idle(timeout=20)
        assert server.server.service.num_open == 0, "their places are free before they read"
        for call in stuck:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "more than 64 tokens unread" in caught.value.details()


@asynchronous
async def test_clients_that_go_before_their_first_token_leave_no_lines_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = EchoEngine(EchoOptions(num_pages=4096, never=(EOS,)))
    async with echo_server(engine) as server:
        async with grpc.aio.insecure_channel(server.address, options=NARROW) as channel:
            calls = [raw_generate(channel)(long_request(number, 100)) for number in range(250)]
            await eventually(lambda: server.server.service.num_open >= 50, "some run")
            for call in calls:
                call.cancel()
        await eventually(lambda: server.server.service.num_open == 0, "streams closed", 20)
    assert [record for record in caplog.records if record.name.startswith("grpc")] == []


@asynchronous
async def test_a_write_that_takes_too_long_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may have ended long before, but the call would hold its place for ever."""
    engine = EchoEngine(EchoOptions(num_pages=1024, max_seq_len=4096, never=(EOS,)))
    limits = ServiceLimits(max_unread_tokens=1_000_000)
    monkeypatch.setattr(
        "trtc.runtime.frontends.grpc.frontend.InferenceServicer",
        lambda service, intake: InferenceServicer(service, intake, stalled_client_s=0.3),
    )
    async with (
        echo_server(engine, config=replace(CONFIG, limits=limits)) as server,
        grpc.aio.insecure_channel(server.address, options=NARROW) as channel,
    ):
        call = raw_generate(channel)(long_request(1, 4000))
        await eventually(lambda: server.server.service.num_open == 1, "the stream opened")
        await eventually(lambda: server.server.service.num_open == 0, "the stream closed", 20)
        await server.idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert "took no message for 0.3 s" in caught.value.details()


@asynchronous
async def test_thousands_of_requests_each_get_exactly_one_end() -> None:
    engine = EchoEngine(EchoOptions(num_pages=1024, max_batch_size=256, max_num_tokens=1024))
    config = replace(
        CONFIG, engine=EngineConfig(max_queue=500), limits=ServiceLimits(max_streams=20_000)
    )
    num_requests = 2_500
    async with echo_server(engine, config=config) as server:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(server.address)) for _ in range(20)
            ]

            async def complete(number: int) -> str:
                generation = clients[number % len(clients)].generate(
                    [number % 512], max_tokens=1, temperature=0.0
                )
                try:
                    result = await generation.result()
                except QueueFullError as error:
                    assert "waiting requests" in error.problem
                    return "refused"
                assert list(result.token_ids) == wanted[number % 512]
                return "answered"

            wanted = [greedy([number], 1) for number in range(512)]
            ends = Counter(
                await asyncio.gather(*(complete(number) for number in range(num_requests)))
            )
        assert sum(ends.values()) == num_requests
        assert ends["answered"] >= 500
        await server.idle()
        assert server.handle().loop.stats().requests_finished == ends["answered"]


@asynchronous
async def test_more_streams_than_the_limit_are_refused_and_say_so() -> None:
    engine = EchoEngine(EchoOptions(step_s=0.02, never=(EOS,)))
    config = replace(CONFIG, limits=ServiceLimits(max_streams=3))
    async with (
        echo_server(engine, config=config) as server,
        AsyncClient(server.address) as client,
        AsyncClient(server.address) as other,  # the third place is no more the first one's
    ):
        held = [one.generate([1], max_tokens=500) for one in (client, client, other)]
        for generation in held:
            await anext(generation)
        with pytest.raises(QueueFullError, match="limit of 3 open streams"):
            await client.generate([1], max_tokens=1).result()
        held[0].cancel()
        await eventually(lambda: server.server.service.num_open == 2, "a place is free")
        await client.generate([1], max_tokens=1).result()


@asynchronous
async def test_a_full_queue_refuses_at_once() -> None:
    options = EchoOptions(step_s=0.02, never=(EOS,), max_batch_size=2)
    config = replace(CONFIG, engine=EngineConfig(max_queue=2))
    async with (
        echo_server(EchoEngine(options), config=config) as server,
        AsyncClient(server.address) as client,
    ):
        running = [client.generate([number], max_tokens=500) for number in range(2)]
        for generation in running:
            await anext(generation)
        waiting = [client.generate([number], max_tokens=5) for number in range(2)]
        await eventually(lambda: server.handle().loop.stats().waiting == 2, "two wait")
        with pytest.raises(QueueFullError, match="limit of 2 waiting requests"):
            await client.generate([1], max_tokens=1).result()
        for generation in running:
            generation.cancel()
        for generation in waiting:
            assert len((await generation.result()).token_ids) == 5


@asynchronous
async def test_a_storm_of_cancels_leaks_nothing() -> None:
    engine = EchoEngine(EchoOptions(num_pages=128, step_s=0.001, never=(EOS,)))
    async with echo_server(engine) as server, AsyncClient(server.address) as client:

        async def give_up(number: int) -> None:
            generation = client.generate([number] * 30, max_tokens=400, n=1 + number % 3)
            try:
                for _ in range(number % 7):
                    await anext(generation)
            except (TrtcError, StopAsyncIteration):
                pass
            generation.cancel()

        for begin in range(0, 300, 100):
            await asyncio.gather(*(give_up(number) for number in range(begin, begin + 100)))
        await server.idle()
        await eventually(lambda: server.server.service.num_open == 0, "streams closed")
        wanted = greedy([3], 10, engine.options)
        result = await client.generate([3], max_tokens=10, temperature=0.0).result()
        assert list(result.token_ids) == wanted


@asynchronous
async def test_a_client_that_fills_the_queue_leaves_room_for_others() -> None:
    options = EchoOptions(step_s=0.02, never=(EOS,), max_batch_size=2)
    config = replace(CONFIG, engine=EngineConfig(max_queue=30))
    async with (
        echo_server(EchoEngine(options), config=config) as server,
        AsyncClient(server.address) as greedy_one,
        AsyncClient(server.address) as modest,
    ):

        def refused() -> float | None:
            return Exposition(server.server.metrics).registry.get_sample_value(
                "trtc_request_refused_total", {"model_name": "echo", "limit": "queue_share"}
            )

        # Both rows are taken before the flood: a request that found the queue full while the first
        # ones still waited for a row would leave a place open.
        held = [greedy_one.generate([1], max_tokens=500) for _ in range(2)]
        await eventually(lambda: server.handle().loop.stats().running == 2, "both rows are taken")
        flood = [greedy_one.generate([1], max_tokens=500) for _ in range(38)]
        await eventually(lambda: refused() == 18, "what is beyond its share is refused")
        # A refusal may overtake what was admitted before it, on its way to the loop.
        await eventually(lambda: server.handle().loop.stats().waiting == 20, "its share waits")
        with pytest.raises(QueueFullError, match="this client has its share of 20 waiting req"):
            await greedy_one.generate([1], max_tokens=1).result()
        waiting = modest.generate([2], max_tokens=1)
        await eventually(lambda: server.handle().loop.stats().waiting == 21, "it waits")
        for generation in [*held, *flood, waiting]:
            generation.cancel()
        await server.idle()
        assert refused() == 19


@asynchronous
async def test_a_client_that_fills_the_streams_leaves_room_for_others() -> None:
    engine = EchoEngine(EchoOptions(num_pages=1024, max_seq_len=8192, never=(EOS,)))
    config = replace(CONFIG, limits=ServiceLimits(max_streams=12, max_unread_tokens=1_000_000))
    async with (
        echo_server(engine, config=config) as server,
        grpc.aio.insecure_channel(server.address, options=NARROW) as channel,
        AsyncClient(server.address) as modest,
    ):
        unread = [raw_generate(channel)(long_request(1, 8000)) for _ in range(12)]
        await eventually(lambda: server.server.service.num_open == 8, "it holds its share")
        for _ in range(3):
            result = await modest.generate([2], max_tokens=5, temperature=0.0).result()
            assert list(result.token_ids) == greedy([2], 5, engine.options)
        for call in unread:
            call.cancel()


@asynchronous
async def test_priority_is_granted_and_not_taken() -> None:
    async with echo_server() as server, AsyncClient(server.address) as client:
        await client.generate([1], max_tokens=1, priority=-10).result()
        with pytest.raises(
            InvalidRequestError, match=r"priority: is 1; this server grants at most 0\. Ask for 0"
        ):
            await client.generate([1], max_tokens=1, priority=1).result()
    granting = replace(CONFIG, limits=ServiceLimits(max_priority=3))
    async with echo_server(config=granting) as server, AsyncClient(server.address) as client:
        await client.generate([1], max_tokens=1, priority=3).result()
        with pytest.raises(InvalidRequestError, match="grants at most 3"):
            await client.generate([1], max_tokens=1, priority=4).result()
