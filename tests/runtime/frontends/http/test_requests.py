"""Requests that come badly, and clients that leave, at every point of an exchange."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.http1 import exchange, post, read_answer
from tests.support.openai_sdk import ECHO, SLOW
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.frontends.http.application import RESERVED_CONNECTIONS
from trtc.runtime.service.limits import ServiceLimits

PATH = "/v1/completions"
CONNECTIONS = "trtc.runtime.frontends.http.connections"


def asking(**fields: object) -> bytes:
    document = {"prompt": [1, 2, 3], "max_tokens": 900, "stream": True, **fields}
    return post(PATH, json.dumps(document).encode())


@contextlib.asynccontextmanager
async def connected(
    server: RunningServer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


def established(port: int) -> int:
    return sum(
        one.laddr.port == port and one.status == "ESTABLISHED"
        for one in psutil.Process().net_connections("tcp")
    )


@asynchronous
async def test_a_client_may_leave_at_every_byte_of_its_request() -> None:
    request = asking()
    async with echo_server(SLOW) as server:
        for end in range(0, len(request) + 1, 7):
            async with connected(server) as (_, writer):
                writer.write(request[:end])
                await writer.drain()
                if end % 2:
                    writer.transport.abort()
        await server.idle()
        await eventually(lambda: established(server.http_port) == 0, "connections end")


@asynchronous
async def test_a_client_may_leave_at_every_event_of_its_answer() -> None:
    async with echo_server(SLOW) as server:
        for num_events in range(8):
            async with connected(server) as (reader, writer):
                writer.write(asking())
                await reader.readuntil(b"\r\n\r\n")
                for _ in range(num_events):
                    await reader.readuntil(b"\n\n")
                if num_events % 2:
                    writer.transport.abort()
            await server.idle(timeout=5)


@asynchronous
async def test_a_thousand_requests_that_are_left_leave_nothing() -> None:
    async with echo_server(SLOW) as server:
        process = psutil.Process()

        async def leave(number: int) -> None:
            async with connected(server) as (_, writer):
                writer.write(asking(stream=number % 3 > 0, n=1 + number % 2))
                await asyncio.sleep(0.002 * (number % 20))
                if number % 2:
                    writer.transport.abort()

        async def storm(count: int) -> None:
            for begin in range(0, count, 50):
                await asyncio.gather(*(leave(begin + one) for one in range(50)))
            await server.idle(timeout=20)
            await eventually(lambda: established(server.http_port) == 0, "connections end")

        await storm(100)
        num_files, num_tasks = process.num_fds(), len(asyncio.all_tasks())
        await storm(1000)
        assert process.num_fds() <= num_files + 2
        assert len(asyncio.all_tasks()) <= num_tasks
        assert server.server.service.num_open == 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 4_000 + b"\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (post(PATH, b"{}", "Transfer-Encoding: chunked"), 400),
        (post(PATH, b"{}", "Content-Length: 3"), 400),
        (post(PATH, b"{}").replace(b"application/json", b"text/plain"), 415),
        (post(PATH, b"{}", "Content-Encoding: gzip"), 415),
        (post(PATH, b"{}").replace(b"POST", b"PUT"), 405),
        (post("/v1/nothing", b"{}"), 404),
        (post(PATH, b"x" * 70_000), 413),
        (post(PATH, b"x" * 2_000_000), 413),
    ],
    ids=lambda value: str(value[:40]) if isinstance(value, bytes) else None,
)
@asynchronous
async def test_a_request_that_cannot_be_taken_gets_its_status(request_: bytes, status: int) -> None:
    config = replace(CONFIG, limits=ServiceLimits(max_request_bytes=65_536))
    async with echo_server(config=config) as server, connected(server) as (reader, writer):
        async with asyncio.timeout(10):
            writer.write(request_)
            first = await reader.readline()
        assert int(first.split()[1]) == status
        assert (await exchange(server.http_port, post(PATH, b'{"prompt": [1]}'))).status == 200


@asynchronous
async def test_a_head_without_an_end_is_bounded() -> None:
    async with echo_server() as server, connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        async with asyncio.timeout(10):
            with contextlib.suppress(OSError):
                while not reader.at_eof():
                    writer.write(b"y" * 1000)
                    await writer.drain()
                    await asyncio.sleep(0)


@asynchronous
async def test_a_body_that_comes_in_chunks_is_taken_and_bounded() -> None:
    head = post(PATH, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    config = replace(CONFIG, limits=ServiceLimits(max_request_bytes=65_536))
    async with echo_server(config=config) as server:
        body = b'{"prompt": [1], "max_tokens": 2}'
        chunks = b"".join(b"1\r\n" + body[at : at + 1] + b"\r\n" for at in range(len(body)))
        assert (await exchange(server.http_port, head + chunks + b"0\r\n\r\n")).status == 200
        many = (b"1000\r\n" + b" " * 4096 + b"\r\n") * 40
        answer = await exchange(server.http_port, head + many + b"0\r\n\r\n")
        assert (answer.status, answer.error["param"]) == (413, "body")


@asynchronous
async def test_a_body_that_does_not_come_whole_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtc.runtime.service.intake.READ_S", 0.3)
    async with echo_server() as server, connected(server) as (reader, writer):
        writer.write(post(PATH, b"{" * 100)[:-1])
        async with asyncio.timeout(10):
            answer = await read_answer(reader)
            assert "did not come whole" in answer.error["message"]
            assert await reader.read() == b""


@asynchronous
async def test_bodies_that_never_come_keep_no_probe_out() -> None:
    limits = ServiceLimits(max_request_bytes=1 << 20, max_bytes_in_flight=4 << 20)
    async with (
        echo_server(config=replace(CONFIG, limits=limits)) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(20):  # of four turns, one host has three
            _, writer = await stack.enter_async_context(connected(server))
            writer.write(post(PATH, b" " * 100_000)[:-1])
        health = await exchange(
            server.http_port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        assert health.status == 200


@asynchronous
async def test_requests_may_follow_each_other_on_a_connection() -> None:
    async with echo_server() as server, connected(server) as (reader, writer):
        for _ in range(3):
            writer.write(asking(max_tokens=3, stream=False))
            assert (await read_answer(reader)).status == 200
        writer.write(asking(max_tokens=3) + asking(max_tokens=3, stream=False) + asking(top_p=2))
        events = (await read_answer(reader)).body
        assert events.endswith(b"data: [DONE]\n\n")
        assert (await read_answer(reader)).status == 200
        assert (await read_answer(reader)).status == 400


@asynchronous
async def test_a_client_that_reads_nothing_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{CONNECTIONS}.STALLED_CLIENT_S", 0.5)
    async with echo_server(ECHO) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            await asyncio.to_thread(client.connect, ("127.0.0.1", server.http_port))
            # Long events: kernels hold megabytes for a client.
            request = asking(n=8, logprobs=20, max_tokens=1000)
            await asyncio.to_thread(client.sendall, request)
            await eventually(lambda: established(server.http_port) == 0, "it is closed", 60)
        await server.idle()


@asynchronous
async def test_streams_that_take_every_connection_leave_probes_theirs() -> None:
    limits = ServiceLimits(max_connections=RESERVED_CONNECTIONS + 16)
    async with echo_server(SLOW, config=replace(CONFIG, limits=limits)) as server:
        async with contextlib.AsyncExitStack() as stack:
            statuses = []
            for _ in range(100):
                reader, writer = await stack.enter_async_context(connected(server))
                writer.write(asking())
                statuses.append(int((await reader.readline()).split()[1]))
            assert statuses[:30] == [200] * 30
            assert statuses[-1] == 429, "a host has its share"
            for path in (b"/healthz", b"/metrics"):
                request = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
                assert (await exchange(server.http_port, request)).status == 200
        await server.idle()


@asynchronous
async def test_a_server_that_drains_refuses_and_ends_its_connections() -> None:
    async with (
        echo_server(SLOW) as server,
        connected(server) as (early, asks_early),
        connected(server) as (late, asks_late),
    ):
        asks_early.write(asking(max_tokens=20))
        await eventually(lambda: server.server.service.num_open == 1, "it runs")
        server.server.service.drain()
        asks_late.write(asking())
        answer = await read_answer(late)
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert (await read_answer(early)).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("evil@localhost", False),
        ("[::1", False),
    ],
)
@asynchronous
async def test_names_that_others_give_to_this_machine_are_refused(host: str, is_own: bool) -> None:
    """DNS rebinding: a page of the web reads what its own name answers."""
    async with echo_server() as server:
        for path in ("/v1/models", "/metrics"):
            request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            answer = await exchange(server.http_port, request)
            assert answer.status == (200 if is_own else 403)
            assert is_own or b"this server is for clients of its own machine" in answer.body
