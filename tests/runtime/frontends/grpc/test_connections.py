"""Clients of the gRPC port that open and cancel without end, or connect and say nothing."""

import asyncio
import contextlib
import multiprocessing
import resource
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import grpc.aio
import psutil
import pytest

from tests.support.aio import asynchronous
from tests.support.http2 import RawClient, reset_rapidly, storm
from tests.support.processes import resident_bytes
from tests.support.servers import CONFIG, echo_process, echo_server
from trtc.cli import main
from trtc.protos.errors import QueueFullError, UnavailableError
from trtc.runtime.client import AsyncClient, Client
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.frontends.grpc.host_connections import HostConnections
from trtc.runtime.server.process import prepare_process
from trtc.runtime.service.limits import ServiceLimits

GENERATE = "/trtc.v1.Inference/Generate"
HOSTS = "trtc.runtime.frontends.grpc.host_connections"
CALLS = 20_000
Storm = Callable[[str, float], BaseProcess]


def test_calls_opened_and_cancelled_at_once_cost_the_server_little() -> None:
    """Measured in the server's CPU time and memory, which do not depend on how busy the machine
    is. Were every call given to a handler, they would take 14 s and grow by 100 MB."""
    with echo_process("--max-streams", "16") as server, Client(server.address) as client:
        process = psutil.Process(server.process.pid)

        def attack() -> tuple[float, int]:
            before = _cpu_s(process)
            reset_rapidly(server.address, GENERATE, CALLS)
            assert client.generate([1], max_tokens=2).result().token_ids
            return _cpu_s(process) - before, process.memory_info().rss

        attack()
        rounds = [attack() for _ in range(3)]
        assert sum(seconds for seconds, _ in rounds) < 3.0
        assert rounds[-1][1] - rounds[0][1] < 32 << 20


def test_calls_without_a_key_cost_the_server_little(tmp_path: Path) -> None:
    """Were each refused at once, a client could have thousands a second refused."""
    keys = tmp_path / "keys.json"
    assert main(["keys", str(keys), "--add", "alice"]) == 0

    async def flood(address: str, seconds: float) -> int:
        num_refused, end = 0, time.monotonic() + seconds

        async def ask(method: grpc.aio.UnaryUnaryMultiCallable) -> None:
            nonlocal num_refused
            while time.monotonic() < end:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await method(b"", timeout=max(0.01, end - time.monotonic()))
                num_refused += 1

        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_unary("/trtc.v1.Inference/GetModelInfo", None, None)
            await asyncio.gather(*(ask(method) for _ in range(300)))
        return num_refused

    with echo_process("--api-keys", str(keys)) as server:
        assert asyncio.run(flood(server.address, 3.0)) < 200 + 3 * 100 + 300 + 50
        server.process.terminate()
        assert server.process.wait(timeout=10) == 0


@pytest.fixture
def several_connections() -> Iterator[Storm]:
    """Begin storms of four connections each."""
    begun: list[BaseProcess] = []

    def begin(address: str, seconds: float) -> BaseProcess:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=storm, args=(address, GENERATE, 4, seconds))
        process.start()
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.join()


def test_others_are_served_while_several_connections_storm(several_connections: Storm) -> None:
    with echo_process() as server, Client(server.address) as client:
        client.generate([1], max_tokens=2).result()
        storming = several_connections(server.address, 60)

        def wait_s(client: Client) -> float:
            begin = time.monotonic()
            assert len(client.generate([1], max_tokens=2, timeout=30).result().token_ids) >= 1
            return time.monotonic() - begin

        time.sleep(1)
        wait_s(client)  # behind what the connections had open when the storm began
        waits = [wait_s(client) for _ in range(5)]
        for _ in range(4):
            with Client(server.address) as newcomer:
                waits.append(wait_s(newcomer))
        assert storming.is_alive()
        # The storm takes the same cores as the server and its clients: alone they answer in ms.
        assert statistics.median(waits) < 3.0


def test_memory_stays_level_over_storms_of_several_connections(several_connections: Storm) -> None:
    with echo_process() as server, Client(server.address) as client:

        def resident_after_a_storm() -> int:
            several_connections(server.address, 1).join()
            client.generate([1], max_tokens=2).result()
            return resident_bytes(server.process.pid)

        for _ in range(3):
            resident_after_a_storm()
        sizes = [resident_after_a_storm() for _ in range(4)]
        assert max(sizes) - sizes[0] < 32 << 20


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynchronous
async def test_more_calls_than_a_connection_may_have_are_answered_or_refused_clearly() -> None:
    config = replace(
        CONFIG, engine=EngineConfig(max_queue=5000), limits=ServiceLimits(max_streams=100)
    )
    async with echo_server(config=config) as server, AsyncClient(server.address) as client:

        async def ask(number: int) -> str:
            try:
                await client.generate([number % 500], max_tokens=1).result()
            except QueueFullError as error:
                return error.problem
            return "answered"

        ends = Counter(await asyncio.gather(*[ask(one) for one in range(2000)]))
    assert ends.pop("answered") >= 50
    for problem in ends:
        assert "open streams" in problem or "as many open calls as" in problem


@asynchronous
async def test_connections_beyond_the_limit_are_closed_and_the_others_served() -> None:
    config = replace(CONFIG, limits=ServiceLimits(max_connections=8))
    async with echo_server(config=config) as server, AsyncClient(server.address) as client:
        await client.generate([1], max_tokens=1).result()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(_raw(server.address)) for _ in range(16)]
            ended = await asyncio.to_thread(lambda: sum(_is_ended(one) for one in clients))
            assert ended >= 16 - 7
            assert len((await client.generate([1], max_tokens=4).result()).token_ids) == 4


@asynchronous
async def test_one_host_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HOSTS}.LOOK_S", 0.1)
    config = replace(CONFIG, limits=ServiceLimits(max_connections=12))
    async with echo_server(config=config) as server:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(_raw(server.address, "127.0.0.2")) for _ in range(18)]
            async with AsyncClient(server.address) as client, asyncio.timeout(20):
                while True:  # as one whose library connects again
                    with contextlib.suppress(UnavailableError):
                        await client.generate([1], max_tokens=1).result()
                        break
                    await asyncio.sleep(0.1)
                ended = await asyncio.to_thread(lambda: sum(map(_is_ended, clients)))
                assert ended == 18 - 9
                assert await client.generate([1], max_tokens=1).result()


def test_only_connections_of_the_port_are_shut_down(tmp_path: Path) -> None:
    """Not other files, nor the clients of other servers in the process."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        others = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pairs = []
        for listener in (others, ours, ours, ours):
            near = stack.enter_context(socket.create_connection(listener.getsockname()))
            pairs.append((near, stack.enter_context(listener.accept()[0])))
        files = [stack.enter_context((tmp_path / str(one)).open("w")) for one in range(50)]
        hosts = HostConnections(ours.getsockname()[1], 3)
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        assert [hosts.limit() for _ in range(3)] == [True] * 3, "an ended one is still open"
        assert len(list(Path("/proc/self/fd").iterdir())) == num_open
        for near, _ in pairs:
            near.settimeout(0.2)
        assert [_is_over(near) for near, _ in pairs].count(True) == 1
        assert not _is_over(pairs[0][0])
        for near, far in pairs[1:]:
            if _is_over(near):
                far.close()
        assert not hosts.limit()
        assert all(not one.closed for one in files)


def _is_over(near: socket.socket) -> bool:
    try:
        return near.recv(1) == b""
    except TimeoutError:
        return False


@asynchronous
async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtc.runtime.wire.channel.HANDSHAKE_S", 1)
    async with echo_server() as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()


def test_a_serving_process_may_open_as_many_files_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        prepare_process()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _raw(address: str, source: str = "") -> Iterator[RawClient]:
    client = RawClient(address, source=source)
    try:
        yield client
    finally:
        client.close()


def _is_ended(client: RawClient) -> bool:
    """Whether the server has ended the connection; an open one has only its settings to say."""
    client.socket.settimeout(0.5)
    try:
        while client.socket.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
