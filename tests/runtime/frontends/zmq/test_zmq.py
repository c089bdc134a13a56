"""KV events over real ZeroMQ sockets, read with vLLM's own classes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.aio import asynchronous
from tests.support.kv_reader import nodes_below
from tests.support.servers import (
    CONFIG,
    EOS,
    EchoEngine,
    RunningServer,
    echo_server,
    open_echo,
)
from tests.support.vllm_events import DECODERS, Router
from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.runtime.client.aio import AsyncClient
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.zmq import publisher
from trtc.runtime.frontends.zmq.frontend import ZmqConfig
from trtc.runtime.requests.principal import SHARED
from trtc.runtime.service.models import Model, ModelState

zmq = pytest.importorskip("zmq", reason="make setup installs it")
zmq_asyncio = pytest.importorskip("zmq.asyncio", reason="make setup installs it")

OPTIONS = EchoOptions(
    num_pages=24, page_size=4, max_batch_size=4, max_seq_len=64, max_num_tokens=32, never=(EOS,)
)
END = (-1).to_bytes(8, "big", signed=True)
LOCAL = ZmqConfig("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@{model}")


@asynccontextmanager
async def publishing(
    config: ZmqConfig = LOCAL,
    options: EchoOptions = OPTIONS,
    *,
    host_pages: int = 0,
    names: Sequence[str] = ("echo",),
    share_prefixes: bool = False,
) -> AsyncIterator[RunningServer]:
    page_bytes = EchoExecutor(options).kv.page_bytes
    server = replace(
        CONFIG,
        frontends=(*CONFIG.frontends, config),
        engine=EngineConfig(kv_events=True, kv_host_bytes=host_pages * page_bytes),
        limits=replace(CONFIG.limits, share_prefixes=share_prefixes),
    )
    async with echo_server(EchoEngine(options), names=names, config=server) as running:
        yield running


class Subscriber:
    """A consumer with sockets of its own."""

    def __init__(self, server: RunningServer, topic: bytes = b"kv@") -> None:
        context = zmq_asyncio.Context.instance()
        addresses = server.server.frontends["kv-events"].address.split(",")
        self.sub = context.socket(zmq.SUB)
        self.sub.connect(addresses[0])
        self.sub.subscribe(topic)
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(addresses[1])

    async def ask(self, first: int) -> list[list[bytes]]:
        """What a replay gives, without its end."""
        await self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        answers: list[list[bytes]] = []
        while True:
            frames = await asyncio.wait_for(self.replay.recv_multipart(), 10)
            assert frames.pop(0) == b""
            if frames[-2] == END:
                return answers
            answers.append(frames)

    def close(self) -> None:
        self.sub.close(linger=0)
        self.replay.close(linger=0)


@asynccontextmanager
async def subscribed(server: RunningServer, topic: bytes = b"kv@") -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(server, topic)
    try:
        yield subscriber
    finally:
        subscriber.close()


async def ask(client: AsyncClient, prompt: Sequence[int], **options: Any) -> None:
    async for _ in client.generate(list(prompt), max_tokens=3, ignore_eos=True, **options):
        pass


async def caught_up(server: RunningServer, name: str = "echo") -> int:
    """The number of the last batch, once everything was told."""
    await server.idle(name)
    log = server.handle(name).loop.kv_events
    assert log is not None
    await asyncio.to_thread(log.collect)
    return log.last


def cached(server: RunningServer, name: str = "echo") -> set[tuple[int, ...]]:
    """The prefixes of all namespaces that the pool has."""
    cache = server.handle(name).loop._state.cache
    return {
        before + node.key for root in cache._roots.values() for node, before in nodes_below(root)
    }


@pytest.mark.parametrize("how", ["map", "array"])
@asynchronous
async def test_a_consumer_rebuilds_what_is_cached(how: Any) -> None:
    """Of one engine under eviction with a tier behind it, read as the events come."""
    router = Router()
    async with (
        publishing(replace(LOCAL, format=how), host_pages=16) as server,
        subscribed(server) as subscriber,
        AsyncClient(server.address) as client,
    ):
        (first,) = await subscriber.ask(0)
        router.take(1, DECODERS[how].decode(first[-1]))
        for number in range(24):
            prompt = [number % 6] * 4 + [number % 7] * 17
            await ask(client, prompt, cache_salt="ours" if number % 2 else "theirs")
        last = await caught_up(server)
        while router.numbers[-1] < last:
            frames: list[bytes] = []
            if await subscriber.sub.poll(500):
                topic, *frames = await subscriber.sub.recv_multipart()
                assert topic == b"kv@pod@echo"
            wanted = router.numbers[-1] + 1
            if not frames or int.from_bytes(frames[0], "big") != wanted:
                answers = await subscriber.ask(wanted)  # told before the subscription came
            else:
                answers = [frames]
            for answer in answers:
                router.take(int.from_bytes(answer[-2], "big"), DECODERS[how].decode(answer[-1]))
        assert router.numbers == list(range(1, last + 1)), "nothing is missing"
        assert router.held("GPU") == cached(server) != set()
        tier = server.handle().loop._tier
        assert tier is not None
        on_host = [one for one in router.blocks if one[1] == "CPU"]
        assert len(on_host) == tier.num_used > 0
        assert all(name in router.tokens for name, _ in on_host)
    if how == "map":
        assert len(set(router.namespaces.values())) == 2


@asynchronous
async def test_replays_fill_gaps_and_name_their_topics_as_vllm_does() -> None:
    async with (
        publishing(names=("a", "b")) as server,
        subscribed(server, b"kv@pod@b") as subscriber,
        AsyncClient(server.address) as client,
    ):
        await ask(client, range(8), model="a")
        await caught_up(server, "a")
        await ask(client, range(20), model="b")
        last = await caught_up(server, "b")
        answers = await subscriber.ask(0)
        assert {topic for topic, *_ in answers} == {b"kv@pod@a", b"kv@pod@b"}
        of_b = [frames for frames in answers if frames[0].endswith(b"@b")]
        assert [int.from_bytes(number, "big") for _, number, _ in of_b] == list(range(1, last + 1))
        later = await subscriber.ask(last)
        assert [frames for frames in later if frames[0].endswith(b"@b")] == of_b[-1:]
        assert await subscriber.ask(1 << 40) == []
        for nonsense in ((b"",), (b"", b"soon"), (b"", b"1234567", b"8")):
            await subscriber.replay.send_multipart(nonsense)
        assert len(await subscriber.ask(0)) == len(answers), "others are not disturbed"
    async with (
        publishing(replace(LOCAL, format="array")) as server,
        subscribed(server) as subscriber,
    ):
        assert {len(frames) for frames in await subscriber.ask(0)} == {2}, "no topics"


@asynchronous
async def test_where_the_beginning_is_gone_a_replay_says_what_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "MAX_REPLAY_BYTES", 400)
    async with (
        publishing() as server,
        subscribed(server) as subscriber,
        AsyncClient(server.address) as client,
    ):
        for number in range(10):
            await ask(client, [number] * 9, cache_salt="common")
            await caught_up(server)
        router = Router()
        for frames in await subscriber.ask(0):
            router.take(int.from_bytes(frames[1], "big"), DECODERS["map"].decode(frames[2]))
        assert router.numbers[-1] == await caught_up(server)
        assert router.held("GPU") == cached(server) != set()


@asynchronous
async def test_numbers_go_on_where_another_engine_has_the_name() -> None:
    router = Router()
    async with publishing() as server, subscribed(server) as subscriber:
        async with AsyncClient(server.address) as client:
            await ask(client, range(9))
            await caught_up(server)
            before = await subscriber.ask(0)
            old, config = server.handle(), server.server.config.engine
            new = open_echo(EchoEngine(OPTIONS), "echo", config)
            await asyncio.to_thread(old.loop.stop)
            server.server.models.put(Model("echo", ModelState.READY, engine=new))
            old.close()
            await ask(client, range(20, 29))
            await caught_up(server)
        for _, number, data in await subscriber.ask(0):
            router.take(int.from_bytes(number, "big"), DECODERS["map"].decode(data))
        assert router.held("GPU") == cached(server) == {(20, 21, 22, 23), tuple(range(20, 28))}
    assert router.numbers[0] > int.from_bytes(before[-1][1], "big")


@asynchronous
async def test_no_salt_and_no_name_of_a_client_is_told() -> None:
    salts = ("correct horse", "battery staple")
    router, told = Router(), b""
    async with (
        publishing(share_prefixes=True) as server,
        subscribed(server) as subscriber,
        AsyncClient(server.address) as client,
    ):
        for salt in ("", *salts, *salts):
            await ask(client, [7] * 9, cache_salt=salt)
        last = await caught_up(server)
        for frames in await subscriber.ask(0):
            told += b"".join(frames)
            router.take(int.from_bytes(frames[1], "big"), DECODERS["map"].decode(frames[2]))
        log = server.handle().loop.kv_events
        assert log is not None and router.numbers[-1] == last
        assert router.held("GPU") == {(7,) * 4, (7,) * 8}
        assert len(router.blocks) == 6, "the same tokens in three namespaces"
    assert len(router.namespaces) == len(set(router.namespaces.values())) == 2
    for secret in (*salts, "connection", "127.0.0.1", *SHARED):
        assert secret.encode() not in told


@asynchronous
async def test_routers_hear_that_nothing_is_cached_when_the_server_ends() -> None:
    async with publishing() as server:
        subscriber = Subscriber(server)
        async with AsyncClient(server.address) as client:
            for number in range(100):
                await ask(client, [number] * 9)
                if await subscriber.sub.poll(100):
                    break
    try:
        while await subscriber.sub.poll(500):
            *_, data = await subscriber.sub.recv_multipart()
    finally:
        subscriber.close()
    (event,) = DECODERS["map"].decode(data).events
    assert type(event).__name__ == "AllBlocksCleared"


@asynchronous
async def test_without_pyzmq_or_a_free_port_the_server_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with publishing() as server:
        taken = server.server.frontends["kv-events"].address.split(",")[0]
        with pytest.raises(RequestError, match=r"--kv-events: cannot listen on .*in use"):
            async with publishing(replace(LOCAL, endpoint=taken)):
                pass
        with pytest.raises(RequestError, match=r"--kv-events-replay: cannot listen on"):
            async with publishing(replace(LOCAL, replay=taken)):
                pass
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(EnvironmentFault, match=r"--kv-events: needs pyzmq.*trtc\[kv-events\]"):
        async with publishing():
            pass
