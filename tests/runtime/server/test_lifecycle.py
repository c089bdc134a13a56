"""Start, ports, TLS, draining, death."""

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.certificates import Certificates, make_certificates
from tests.support.http1 import exchange, post, read_answer
from tests.support.rank_worker import LocalEcho, Role, open_echo_ranks
from tests.support.rank_worker import command as rank_command
from tests.support.servers import (
    CONFIG,
    EOS,
    EchoEngine,
    echo_process,
    echo_server,
    frontends,
    greedy,
    open_echo,
    serve_executor,
)
from trtc.protos.errors import (
    EngineCorruptError,
    EnvironmentFault,
    RequestError,
    TrtcError,
    UnavailableError,
)
from trtc.runtime.client import AsyncClient, Client, ClientTls
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.executors.ranks.group import RankGroup
from trtc.runtime.server.app import WATCH_INTERVAL_S, Server, engine_sources
from trtc.runtime.wire.tls import ServerTls

SLOW = EchoEngine(EchoOptions(step_s=0.02, never=(EOS,)))


def read_to_the_end(client: Client, number: int, started: threading.Event) -> str:
    """How one stream ended, told exactly once."""
    ends = []
    generation = client.generate([number], max_tokens=60, temperature=0.0, ignore_eos=True)
    try:
        for output in generation:
            started.set()
            if output.usage is not None:
                ends.append("finished")
        assert list(generation.result().token_ids) == greedy([number], 60, SLOW.options)
    except TrtcError as error:
        ends.append(type(error).__name__)
    assert len(ends) == 1
    return ends[0]


def drain(stop: signal.Signals, *arguments: str) -> tuple[list[str], int, float]:
    """40 streams on a server that is told to stop: their ends, its exit status, its seconds."""
    with echo_process(*arguments) as server, Client(server.address) as client:
        events = [threading.Event() for _ in range(40)]
        with ThreadPoolExecutor(40) as pool:
            streams = [
                pool.submit(read_to_the_end, client, number, event)
                for number, event in enumerate(events)
            ]
            assert all(event.wait(10) for event in events)
            begin = time.monotonic()
            server.process.send_signal(stop)
            time.sleep(0.2)
            with pytest.raises(UnavailableError):
                client.generate([1], max_tokens=1).result()
            ends = [stream.result(timeout=30) for stream in streams]
        status = server.process.wait(timeout=30)
        return ends, status, time.monotonic() - begin


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_running_streams_finish_while_the_server_drains(stop: signal.Signals) -> None:
    ends, status, _ = drain(stop, "--step-s", "0.02")
    assert ends == ["finished"] * 40
    assert status == 0


def test_streams_that_outlive_the_drain_timeout_end_with_one_error() -> None:
    ends, status, seconds = drain(signal.SIGTERM, "--step-s", "0.1", "--drain-timeout", "0.5")
    assert ends == ["UnavailableError"] * 40
    assert status == 0
    assert seconds < 5


def test_a_second_signal_does_not_wait() -> None:
    arguments = ("--step-s", "0.1", "--drain-timeout", "60")
    with echo_process(*arguments) as server, Client(server.address) as client:
        generation = client.generate([1], max_tokens=900)
        next(generation)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(UnavailableError):
            generation.result()
        assert server.process.wait(timeout=5) == 0


def test_a_killed_server_is_unavailable_at_once() -> None:
    with echo_process("--step-s", "0.02") as server, Client(server.address) as client:
        generation = client.generate([1], max_tokens=900)
        next(generation)
        server.process.kill()
        begin = time.monotonic()
        with pytest.raises(UnavailableError, match="cannot reach the server"):
            generation.result()
        with pytest.raises(UnavailableError):
            client.generate([1], max_tokens=1).result()
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("option", ["grpc_port", "http_port"])
def test_a_port_in_use_is_one_clear_error(option: str) -> None:
    opened: list[str] = []

    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        opened.append(source.name)
        return open_echo(EchoEngine(), source.name, config)

    @asynchronous
    async def clash() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = Server(replace(CONFIG, frontends=frontends(**{option: port})), opener=opener)
            with pytest.raises(RequestError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
                await server.run()
            assert caught.value.field == f"--{option.replace('_', '-')}"

    clash()
    assert opened == [], "the port is tried before an engine is opened"


@asynchronous
async def test_two_servers_never_share_a_port() -> None:
    async with echo_server() as server:
        again = Server(
            replace(CONFIG, frontends=frontends(grpc_port=server.server.frontends["grpc"].port)),
            opener=lambda source, config: open_echo(EchoEngine(), source.name, config),
        )
        with pytest.raises(RequestError, match="cannot listen"):
            await again.run()


@asynchronous
async def test_an_engine_that_does_not_open_ends_the_start() -> None:
    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        if source.name == "bad":
            raise EngineCorruptError("one byte is flipped", field="weights.safetensors")
        return open_echo(EchoEngine(), source.name, config)

    sources = (EngineSource("good", Path("good")), EngineSource("bad", Path("bad")))
    server = Server(replace(CONFIG, engines=sources), opener=opener)
    with pytest.raises(EngineCorruptError, match="one byte is flipped"):
        await server.run()


def mortal_server(*names: str) -> Server:
    """The engine called mortal dies at its fifth step."""

    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        fails = 5 if source.name == "mortal" else None
        return open_echo(EchoEngine(EchoOptions(fail_at_step=fails)), source.name, config)

    sources = tuple(EngineSource(name, Path(name)) for name in names)
    return Server(replace(CONFIG, engines=sources), opener=opener)


async def kill_mortal(server: Server) -> None:
    async with AsyncClient(server.frontends["grpc"].address) as client:
        with pytest.raises(UnavailableError, match="asked to fail"):
            await client.generate([1], model="mortal", max_tokens=20, ignore_eos=True).result()
    await eventually(lambda: bool(server.service.why_not_ready()), "it is dead")


@asynchronous
async def test_a_server_whose_last_engine_dies_ends_with_its_error() -> None:
    server = mortal_server("mortal")
    running = asyncio.create_task(server.run())
    await eventually(lambda: not server.service.why_not_ready(), "it serves")
    await kill_mortal(server)
    with pytest.raises(EnvironmentFault, match=r"engine mortal has failed: .*asked to fail"):
        await asyncio.wait_for(running, 10)


@asynchronous
async def test_a_server_goes_on_with_the_engines_that_live() -> None:
    server = mortal_server("mortal", "other")
    running = asyncio.create_task(server.run())
    await eventually(lambda: not server.service.why_not_ready(), "it serves")
    await kill_mortal(server)
    await asyncio.sleep(2 * WATCH_INTERVAL_S)
    assert not running.done()
    server.stop()
    await running


@asynchronous
async def test_a_killed_rank_ends_the_server_within_seconds() -> None:
    """A model on three processes, one of which dies under a stream."""
    groups = []

    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        options = EchoOptions(step_s=0.02, never=(EOS,))
        group = RankGroup([rank_command(Role(options))] * 2)
        groups.append(group)
        executor = open_echo_ranks(group, lambda: LocalEcho(options))
        return serve_executor(executor, EchoEngine(options), source.name, config)

    server = Server(CONFIG, opener=opener)
    running = asyncio.create_task(server.run())
    await eventually(
        lambda: bool(server.service.engines) and not server.service.why_not_ready(), "it serves", 30
    )
    async with AsyncClient(server.frontends["grpc"].address) as client:
        generation = client.generate([1], max_tokens=900, ignore_eos=True)
        await anext(aiter(generation))
        began = time.monotonic()
        os.kill(groups[0].pids[1], signal.SIGKILL)
        with pytest.raises(UnavailableError, match="rank 2 of 3 was ended by signal 9"):
            await generation.result()
    with pytest.raises(EnvironmentFault, match="rank 2 of 3"):
        await asyncio.wait_for(running, 20)
    assert time.monotonic() - began < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in groups[0].pids)


@asynchronous
async def test_while_a_server_runs_the_garbage_collector_leaves_out_what_it_opened() -> None:
    server = Server(
        CONFIG, opener=lambda source, config: open_echo(EchoEngine(), source.name, config)
    )
    running = asyncio.create_task(server.run())
    await eventually(lambda: gc.get_freeze_count() > 0, "it serves")
    server.stop()
    await asyncio.wait_for(running, 20)
    assert gc.get_freeze_count() == 0


@asynchronous
async def test_while_engines_open_requests_are_told_to_wait() -> None:
    gate = threading.Event()

    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        assert gate.wait(10)
        return open_echo(EchoEngine(), source.name, config)

    server = Server(CONFIG, opener=opener)
    starting = asyncio.create_task(server.start())
    await eventually(lambda: server.frontends["grpc"].port != 0, "the port is bound")
    try:
        async with AsyncClient(server.frontends["grpc"].address) as client:
            with pytest.raises(UnavailableError, match="not ready: opening"):
                await client.generate([1], max_tokens=1).result()
            gate.set()
            await starting
            await client.generate([1], max_tokens=1).result()
    finally:
        gate.set()
        await server.close()


@asynchronous
async def test_a_signal_during_the_start_ends_it() -> None:
    gate = threading.Event()
    opened: list[str] = []

    def opener(source: EngineSource, config: EngineConfig) -> EngineHandle:
        opened.append(source.name)
        assert gate.wait(10)
        return open_echo(EchoEngine(), source.name, config)

    sources = (EngineSource("first", Path("a")), EngineSource("second", Path("b")))
    server = Server(replace(CONFIG, engines=sources), opener=opener)
    running = asyncio.create_task(server.run())
    await eventually(lambda: opened == ["first"], "the first engine is opening")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    gate.set()
    await running
    assert opened == ["first"], "what has not begun is not begun"


@asynchronous
async def test_the_start_is_logged_phase_by_phase(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trtc.server")
    server = Server(
        CONFIG, opener=lambda source, config: open_echo(EchoEngine(), source.name, config)
    )
    running = asyncio.create_task(server.run())
    await eventually(lambda: "serving" in caplog.text, "it serves")
    server.stop()
    await running
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"phase=listen seconds=\d+\.\d{3}", lines[0])
    assert re.fullmatch(r"phase=open engine=echo seconds=\d+\.\d{3}", lines[1])
    assert re.fullmatch(r"phase=canaries engine=echo seconds=\d+\.\d{3}", lines[2])
    address = rf"grpc=127\.0\.0\.1:{server.frontends['grpc'].port}"
    assert any(re.search(rf"serving engines=echo {address} http=127", line) for line in lines)
    assert lines[-1] == "stopped"


@pytest.mark.parametrize(
    ("host", "has_tls", "is_warned"),
    [("192.0.2.1", False, True), ("192.0.2.1", True, False), ("127.0.0.1", False, False)],
)
@asynchronous
async def test_a_host_beyond_loopback_without_tls_is_warned_of(
    host: str,
    has_tls: bool,
    is_warned: bool,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """192.0.2.1 is nobody's address (RFC 5737): the port does not open, the warning comes first."""
    tls = certificates.server(mutual=False) if has_tls else None
    server = Server(
        replace(CONFIG, frontends=frontends(host, tls=tls)),
        opener=lambda source, config: open_echo(EchoEngine(), source.name, config),
    )
    try:
        if host != "127.0.0.1":
            with pytest.raises(TrtcError):
                await server.start()
        else:
            await server.start()
    finally:
        await server.close()
    warnings = [one for one in caplog.messages if one.startswith(f"--host {host}")]
    assert len(warnings) == is_warned
    assert all("--tls-cert and --tls-key" in one for one in warnings)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def test_tls_and_mutual_tls(certificates: Certificates) -> None:
    async def ask(address: str, tls: ClientTls | None) -> int:
        async with AsyncClient(address, tls=tls, timeout=10) as client:
            return len((await client.generate([1], max_tokens=2, ignore_eos=True).result()).text)

    @asynchronous
    async def one_way() -> None:
        tls = certificates.server(mutual=False)
        async with echo_server(config=replace(CONFIG, frontends=frontends(tls=tls))) as server:
            await ask(server.address, certificates.trusting)
            with pytest.raises(UnavailableError):
                await ask(server.address, None)

    @asynchronous
    async def both_ways() -> None:
        tls = certificates.server(mutual=True)
        async with echo_server(config=replace(CONFIG, frontends=frontends(tls=tls))) as server:
            await ask(server.address, certificates.client())
            with pytest.raises(UnavailableError):
                await ask(server.address, certificates.trusting)

    one_way()
    both_ways()


@asynchronous
async def test_a_tls_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tls = ServerTls(tmp_path / "none.pem", tmp_path / "none.key")
    server = Server(
        replace(CONFIG, frontends=frontends(tls=tls)),
        opener=lambda source, config: open_echo(EchoEngine(), source.name, config),
    )
    with pytest.raises(RequestError, match=r"none\.key") as caught:
        await server.run()
    assert caught.value.field == "--tls-key"


def test_a_client_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="go together"):
        Client("127.0.0.1:1", tls=ClientTls(cert=tmp_path / "client.pem"))


def test_engines_are_named_by_their_directory_or_as_told(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    sources = engine_sources((str(tmp_path / "left"), f"right={tmp_path}", str(odd)))
    assert sources == (
        EngineSource("left", tmp_path / "left"),
        EngineSource("right", tmp_path),
        EngineSource("a=b", odd),
    )


@pytest.mark.parametrize("arguments", [("one/x", "two/x"), ("=x",), ("a=x", "a=y")])
def test_two_engines_of_one_name_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="name"):
        engine_sources(arguments)


@asynchronous
async def test_a_server_that_drains_closes_kept_connections_and_lets_streams_end() -> None:
    engine = EchoEngine(EchoOptions(step_s=0.01, never=(EOS,)))
    completion = {"model": "echo", "prompt": [5], "max_tokens": 60, "ignore_eos": True}

    def ask(**fields: object) -> bytes:
        return post("/v1/completions", json.dumps({**completion, **fields}).encode())

    async with echo_server(engine) as server:
        port = server.http_port
        streaming, stream = await asyncio.open_connection("127.0.0.1", port)
        kept, keep = await asyncio.open_connection("127.0.0.1", port)
        stream.write(ask(stream=True))
        head = await streaming.readuntil(b"\r\n\r\n")
        keep.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await read_answer(kept)
        assert (answer.status, answer.headers.get("connection")) == (200, None)
        server.server.stop()
        server.server.service.drain()
        keep.write(ask())
        answer = await read_answer(kept)
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await kept.read() == b""
        for path, status in (("/healthz", 200), ("/readyz", 503), ("/v1/models", 503)):
            answer = await exchange(
                port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert b"connection: close" not in head.lower()
        events = await streaming.readuntil(b"[DONE]")
        assert b'"finish_reason":"length"' in events
        for one in (keep, stream):
            one.close()


@asynchronous
async def test_the_process_is_known_to_live_while_every_thread_is_busy() -> None:
    release = threading.Event()
    async with echo_server() as server:
        get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await exchange(server.http_port, get)
        waiting = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(64)]
        try:
            for path in ("healthz", "readyz"):
                answer = await exchange(server.http_port, get.replace(b"healthz", path.encode()))
                assert answer.status == 200
        finally:
            release.set()
            await asyncio.gather(*waiting)
