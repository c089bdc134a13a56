"""SubscribeKvEvents of trtllm.TrtllmService, asked by the stubs of PyPI's smg-grpc-proto."""

import asyncio
import importlib
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.runtime.server.test_access import ALICE, BOB, TENANTS
from tests.support.aio import asynchronous, eventually
from tests.support.keys import holding, write_keys
from tests.support.kv_reader import nodes_below
from tests.support.servers import CONFIG, EOS, EchoEngine, RunningServer, echo_server
from trtc.runtime.client.aio import AsyncClient
from trtc.runtime.engine import kv_events as log_module
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.grpc.frontend import GrpcConfig
from trtc.runtime.frontends.grpc.smg import kv_events
from trtc.runtime.requests.principal import CERTIFICATE_SCOPES, Scope
from trtc.runtime.server.app import ServerConfig
from trtc.runtime.service.access import AccessConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
    smg = pytest.importorskip("smg_grpc_proto", reason="make setup installs it")
    pb_grpc = smg.trtllm_service_pb2_grpc
    common_pb2 = importlib.import_module("smg_grpc_proto.generated.common_pb2")

OPTIONS = EchoOptions(
    num_pages=24, page_size=4, max_batch_size=4, max_seq_len=64, max_num_tokens=32, never=(EOS,)
)
PAGE_BYTES = EchoExecutor(OPTIONS).kv.page_bytes
TELLING = replace(
    CONFIG,
    frontends=(GrpcConfig(port=0, kv_events=True), *CONFIG.frontends[1:]),
    engine=EngineConfig(kv_events=True, kv_host_bytes=16 * PAGE_BYTES),
    limits=replace(CONFIG.limits, share_prefixes=True),
)


def telling(config: ServerConfig = TELLING) -> Any:
    return echo_server(EchoEngine(OPTIONS), config=config)


@asynccontextmanager
async def subscribed(server: RunningServer, start: int = 0, key: str = "") -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.TrtllmServiceStub(channel)
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
        metadata = (("x-api-key", key),) if key else ()
        call = stub.SubscribeKvEvents(request, metadata=metadata, timeout=20)
        yield call
        call.cancel()


async def ask(server: RunningServer, prompts: Sequence[Sequence[int]], **options: Any) -> int:
    """The number of the last batch that tells of it."""
    async with AsyncClient(server.address) as client:
        for prompt in prompts:
            async for _ in client.generate(list(prompt), max_tokens=3, ignore_eos=True, **options):
                pass
    await server.idle()
    log = server.handle().loop.kv_events
    assert log is not None
    await asyncio.to_thread(log.collect)
    return log.last


class Gateway:
    """What SMG believes: hash and tier of each block, and what the hashes stand for."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, int]] = set()
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.salts: dict[int, str] = {}
        self.seen = 0
        self.chunks: list[Any] = []

    async def read(self, call: Any, last: int) -> None:
        while self.seen < last:
            batch = await call.read()
            assert batch, "the stream has ended"
            assert not self.seen or batch.sequence_number == self.seen + 1, "a gap"
            self.seen = batch.sequence_number
            if batch.HasField("snapshot"):
                self.chunks.append(batch.snapshot)
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: Any) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.blocks.clear()
        elif kind == "removed":
            for one in event.removed.block_hashes:
                self.blocks.remove((one, event.removed.tier))
        else:
            stored = event.stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            for block in stored.blocks:
                assert len(block.token_ids) == block.block_size == OPTIONS.page_size
                self.tokens[block.block_hash] = parent, tuple(block.token_ids)
                self.salts[block.block_hash] = stored.cache_salt
                self.blocks.add((block.block_hash, stored.tier))
                parent = block.block_hash

    def held(self, tier: int) -> set[tuple[int, ...]]:
        found = set()
        for name, where in self.blocks:
            tokens: tuple[int, ...] = ()
            at: int | None = name
            while at is not None:
                at, own = self.tokens[at]
                tokens = own + tokens
            if where == tier:
                found.add(tokens)
        return found


def cached(server: RunningServer) -> set[tuple[int, ...]]:
    roots = server.handle().loop._state.cache._roots.values()
    return {before + node.key for root in roots for node, before in nodes_below(root)}


@asynchronous
async def test_a_gateway_knows_what_is_cached() -> None:
    gateway = Gateway()
    async with telling() as server, subscribed(server) as call:
        await ask(server, [[number] * 17 for number in range(6)])
        last = await ask(server, [[number] * 17 for number in range(6)], cache_salt="ours")
        await gateway.read(call, last)
        assert gateway.held(common_pb2.KV_CACHE_TIER_DEVICE) == cached(server) != set()
        on_host = [one for one in gateway.blocks if one[1] == common_pb2.KV_CACHE_TIER_HOST]
        assert len(on_host) == server.handle().loop._tier.num_used > 0
        assert len(set(gateway.salts.values())) == 2, "shared, and that of the salt"
        assert {"", "ours"} & set(gateway.salts.values()) == {""}
        async with subscribed(server, start=last) as again:
            batch = await again.read()
        assert batch.sequence_number == last, "what is kept is sent as it was"
        assert not batch.HasField("snapshot")


@asynchronous
async def test_who_comes_late_or_from_another_server_gets_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = log_module.EventLog.__init__
    monkeypatch.setattr(
        log_module.EventLog,
        "__init__",
        lambda *args: init(*args, max_batches=3),
    )
    monkeypatch.setattr(log_module, "BATCH_BLOCKS", 2)
    async with telling() as server:
        for number in range(5):
            last = await ask(server, [[number] * 9])
        for start in (0, 1, 1 << 40):
            gateway = Gateway()
            async with subscribed(server, start) as call:
                await gateway.read(call, last)
                assert gateway.chunks[0].count == len(gateway.chunks) > 1
                assert [one.index for one in gateway.chunks] == list(range(len(gateway.chunks)))
                assert gateway.chunks[0].blocks == len(gateway.blocks)
                assert gateway.held(common_pb2.KV_CACHE_TIER_DEVICE) == cached(server)
                last = await ask(server, [[7, start % 5] * 5])
                await gateway.read(call, last)
                assert gateway.held(common_pb2.KV_CACHE_TIER_DEVICE) == cached(server)


@asynchronous
async def test_subscribers_are_bounded_and_one_that_falls_behind_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "MAX_SUBSCRIBERS", 1)
    async with telling() as server:
        async with subscribed(server) as call:
            assert (await call.read()).sequence_number == 1
            async with subscribed(server) as another:
                with pytest.raises(grpc.aio.AioRpcError, match="limit of 1 subscribers") as caught:
                    await another.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            log = server.handle().loop.kv_events
            assert log is not None
            log._max_batches = 1
            with log._taking:
                for _ in range(3):
                    log._append([(log_module.AllCleared(),)])
            log._wake()
            with pytest.raises(grpc.aio.AioRpcError, match="fallen too far behind") as caught:
                while True:
                    await call.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with subscribed(server) as again:
            assert (await again.read()).snapshot.count == 1
        await eventually(lambda: not log._listeners, "who has left is not woken any more")


@asynchronous
async def test_events_end_with_the_server() -> None:
    async with telling() as server, subscribed(server) as call:
        await call.read()
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(server.handle().loop.stop)
        assert (await reading).events[-1].WhichOneof("data") == "cleared"
        assert not await call.read()


@asynchronous
async def test_events_need_a_key_of_their_own_and_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, {**TENANTS, "bob": holding(BOB, scopes=(Scope.EVENTS,))})
    async with telling(replace(TELLING, access=AccessConfig(path))) as server:
        async with subscribed(server, key=ALICE) as call:
            with pytest.raises(grpc.aio.AioRpcError, match="may not be used for events"):
                await call.read()
        async with subscribed(server, key=BOB) as call:
            assert (await call.read()).sequence_number == 1
    assert Scope.EVENTS not in CERTIFICATE_SCOPES
    silent = replace(TELLING, frontends=CONFIG.frontends)
    async with telling(silent) as server, subscribed(server) as call:
        with pytest.raises(grpc.aio.AioRpcError, match="--kv-events-grpc") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
