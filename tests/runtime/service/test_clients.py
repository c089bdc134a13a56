"""Clients of one server beside each other: what is one's is out of the other's reach."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.certificates import make_certificates
from tests.support.servers import CONFIG, EOS, EchoEngine, echo_server, frontends, greedy, open_echo
from trtc.protos.errors import InvalidRequestError, UnknownRequestError
from trtc.protos.manifest import Canary
from trtc.runtime.client import AsyncClient, Client
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc.caller import _ip_of
from trtc.runtime.requests.principal import connection, host_of
from trtc.runtime.requests.request import FinishReason
from trtc.runtime.server.app import Server
from trtc.runtime.service.limits import ServiceLimits

SLOW = EchoOptions(step_s=0.01, never=(EOS,))


@asynchronous
async def test_a_client_cannot_end_the_request_of_another() -> None:
    async with (
        echo_server(EchoEngine(SLOW)) as server,
        AsyncClient(server.address) as victim,
        AsyncClient(server.address) as stranger,
    ):
        generation = victim.generate([1], max_tokens=30, request_id="mine")
        await anext(generation)
        with pytest.raises(UnknownRequestError, match="no request called 'mine' is running"):
            await stranger.abort("mine")
        assert (await generation.result()).finish_reason is FinishReason.LENGTH


@asynchronous
async def test_equal_ids_of_two_clients_do_not_meet() -> None:
    async with (
        echo_server(EchoEngine(SLOW)) as server,
        AsyncClient(server.address) as one,
        AsyncClient(server.address) as other,
    ):
        first = one.generate([1], max_tokens=900, request_id="same", temperature=0.0)
        await anext(first)
        second = other.generate([2], max_tokens=20, request_id="same", temperature=0.0)
        await anext(second)
        await one.abort("same")
        assert (await first.result()).finish_reason is FinishReason.ABORTED
        result = await second.result()
        assert list(result.token_ids) == greedy([2], 20, SLOW)
        await server.idle()


@asynchronous
async def test_two_blocking_clients_of_one_process_are_two_clients() -> None:
    def check(address: str) -> None:
        with Client(address) as victim, Client(address) as stranger:
            generation = victim.generate([1], max_tokens=900, request_id="mine")
            next(generation)
            with pytest.raises(UnknownRequestError):
                stranger.abort("mine")
            victim.abort("mine")
            assert generation.result().finish_reason is FinishReason.ABORTED

    async with echo_server(EchoEngine(SLOW)) as server:
        await asyncio.to_thread(check, server.address)


@asynchronous
async def test_nobody_can_abort_the_canaries() -> None:
    """A client that aborts `canary-0` again and again while the server starts."""
    options = replace(SLOW, step_s=0.03)
    canary = Canary(prompt_ids=(5, 6), token_ids=tuple(greedy([5, 6], 20, options)))
    engine = EchoEngine(options, canaries=(canary,))
    opened = threading.Event()

    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        handle = open_echo(engine, source.name, config)
        opened.set()
        return handle

    server = Server(CONFIG, opener=opener)
    starting = asyncio.create_task(server.start())
    try:
        await asyncio.to_thread(opened.wait, 10)
        attempts = 0
        async with AsyncClient(server.frontends["grpc"].address) as attacker:
            while not starting.done():
                attempts += 1
                with pytest.raises(UnknownRequestError):
                    await attacker.abort("canary-0")
        await starting
        assert attempts > 1
        assert not server.service.why_not_ready()
    finally:
        await server.close()


@asynchronous
async def test_a_tenant_is_its_certificate_and_not_its_connection(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, ("alice", "bob"))
    config = replace(CONFIG, frontends=frontends(tls=certificates.server(mutual=True)))
    async with (
        echo_server(EchoEngine(SLOW), config=config) as server,
        AsyncClient(server.address, tls=certificates.client("alice")) as alice,
        AsyncClient(server.address, tls=certificates.client("alice")) as also_alice,
        AsyncClient(server.address, tls=certificates.client("bob")) as bob,
    ):
        generation = alice.generate([1], max_tokens=900, request_id="mine")
        await anext(generation)
        with pytest.raises(UnknownRequestError):
            await bob.abort("mine")
        await also_alice.abort("mine")
        assert (await generation.result()).finish_reason is FinishReason.ABORTED


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.1:50000", "192.0.2.1"),
        ("ipv6:%5B2001:db8:0:7::1%5D:50000", "2001:db8:0:7::/64"),
        ("ipv6:[2001:db8:0:7:ffff::2]:50001", "2001:db8:0:7::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:50000", "192.0.2.1"),
        ("ipv6:[fe80::1%25eth0]:50000", "fe80::/64"),
        ("unix:/run/trtc.sock", "unix"),
        ("", ""),
    ],
)
def test_connections_of_one_host_count_together(peer: str, host: str) -> None:
    assert host_of(_ip_of(peer)) == host
    assert connection(peer, host).is_anonymous


PROMPT = list(range(40, 104))
"""Four pages: an engine that has cached it computes its last token only."""


async def cached(client: AsyncClient, salt: str = "") -> int:
    result = await client.generate(PROMPT, max_tokens=1, cache_salt=salt).result()
    return result.usage.cached_prompt_tokens


@asynchronous
async def test_a_spy_does_not_learn_what_another_client_asked() -> None:
    async with (
        echo_server() as server,
        AsyncClient(server.address) as victim,
        AsyncClient(server.address) as spy,
    ):
        assert await cached(victim) == 0
        assert await cached(spy) == 0
        assert await cached(victim) == 63, "a client finds what it left itself"
        assert server.handle().loop.stats().prefix_hit_tokens == 63


@asynchronous
async def test_clients_with_one_salt_share_prefixes() -> None:
    async with (
        echo_server() as server,
        AsyncClient(server.address) as one,
        AsyncClient(server.address) as other,
    ):
        assert await cached(one, "secret") == 0
        assert await cached(other, "secret") == 63
        assert await cached(other, "guess") == 0
        assert await cached(other) == 0
        with pytest.raises(InvalidRequestError, match="cache_salt: has 257 bytes"):
            await cached(other, "x" * 257)


@asynchronous
async def test_what_left_the_pool_is_the_clients_own_as_well() -> None:
    """The pool holds one such prompt, and the host's memory all of them."""
    config = replace(CONFIG, engine=EngineConfig(kv_host_bytes=1 << 20))
    options = EchoOptions(num_pages=6, max_seq_len=96)
    async with (
        echo_server(EchoEngine(options), config=config) as server,
        AsyncClient(server.address) as one,
        AsyncClient(server.address) as other,
    ):
        for salt in ("", "secret"):
            assert await cached(one, salt) == 0
            assert await cached(other, "guess" + salt) == 0
        assert server.handle().loop.stats().host_hit_tokens == 0
        assert await cached(one) == 63
        assert await cached(other, "secret") == 63
        assert await cached(other) == 0
        assert server.handle().loop.stats().host_hit_tokens >= 64


@asynchronous
async def test_an_operator_may_let_all_clients_share_prefixes() -> None:
    config = replace(CONFIG, limits=ServiceLimits(share_prefixes=True))
    async with (
        echo_server(config=config) as server,
        AsyncClient(server.address) as one,
        AsyncClient(server.address) as other,
    ):
        assert await cached(one) == 0
        assert await cached(other) == 63
        assert await cached(other, "secret") == 0


@asynchronous
async def test_prefixes_are_a_tenants_own_and_so_are_its_salts(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, ("alice", "bob"))
    limits = ServiceLimits(share_prefixes=True)  # of anonymous clients, which these are not
    config = replace(
        CONFIG, frontends=frontends(tls=certificates.server(mutual=True)), limits=limits
    )
    async with (
        echo_server(config=config) as server,
        AsyncClient(server.address, tls=certificates.client("alice")) as alice,
        AsyncClient(server.address, tls=certificates.client("alice")) as also_alice,
        AsyncClient(server.address, tls=certificates.client("bob")) as bob,
    ):
        for salt in ("", "same"):
            assert await cached(alice, salt) == 0
            assert await cached(bob, salt) == 0
            assert await cached(also_alice, salt) == 63


@asynchronous
async def test_a_modest_client_is_served_beside_one_that_takes_all_it_can() -> None:
    """The greedy one has its share of the queue waiting, holds every lane and leaves streams
    unread. What counts is how many of its requests end while the modest one waits for its own."""
    options = EchoOptions(step_s=0.005, never=(EOS,), max_batch_size=4, num_pages=512)
    async with (
        echo_server(EchoEngine(options)) as server,
        AsyncClient(server.address) as greedy_one,
        AsyncClient(server.address) as modest,
    ):
        loop = server.handle().loop
        flood = [greedy_one.generate([number % 500], max_tokens=40) for number in range(300)]
        deadline = asyncio.get_running_loop().time() + 30
        while loop.stats().waiting + loop.stats().requests_finished < 290:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        for number in range(5):
            before = loop.stats().requests_finished
            result = await modest.generate([number], max_tokens=4, temperature=0.0).result()
            assert list(result.token_ids) == greedy([number], 4, options)
            # Of the four lanes one is free within 40 steps; in first-come order 280 would end.
            assert loop.stats().requests_finished - before <= 40
        for generation in flood:
            generation.cancel()
        await server.idle()


@asynchronous
async def test_a_low_priority_is_served_within_a_bound_beside_a_flood_of_higher_ones() -> None:
    """400 requests of a granted priority, and the bound shortened to what a test may take."""
    options = EchoOptions(step_s=0.005, never=(EOS,), max_batch_size=2, num_pages=512)
    config = replace(CONFIG, limits=ServiceLimits(max_priority=10))

    async with (
        echo_server(EchoEngine(options, overdue_s=0.3), config=config) as server,
        AsyncClient(server.address) as flooding,
        AsyncClient(server.address) as modest,
    ):
        loop = server.handle().loop
        flood = [flooding.generate([1], max_tokens=100, priority=10) for _ in range(400)]
        await eventually(lambda: loop.stats().waiting > 300, "the flood waits", 30)
        before = loop.stats().requests_finished
        await modest.generate([2], max_tokens=2, priority=-10).result()
        assert loop.stats().requests_finished - before < 100
        assert loop.stats().waiting > 200
        for generation in flood:
            generation.cancel()
        await server.idle()
