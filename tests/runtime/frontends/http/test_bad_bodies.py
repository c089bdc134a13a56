"""What is wrong with a body whatever its dialect, and clients that leave: each route answers in its
own words, and nothing is left behind. Fields are judged in the dialects' own folders."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.http1 import exchange, post, read_answer
from tests.support.http_routes import ROUTES, Posted
from tests.support.openai_sdk import ECHO, SLOWER
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.service.limits import ServiceLimits

MAX_BYTES = 1 << 19
BODIES: list[tuple[bytes, str]] = [
    (b"", "is not JSON"),
    (b'{"mystery": "\xff"}', "is not JSON"),
    (b'{"mystery": "\\ud800"}', "is not JSON"),
    (b'{"mystery": NaN}', "is not JSON"),
    (b'{"mystery": -Infinity}', "is not JSON"),
    (b"\xef\xbb\xbf{}", "is not JSON"),
    (b"\x00", "is not JSON"),
    (b"[]", "expected object, got array"),
    (b"null", "expected object, got null"),
    (b"5", "expected object, got int"),
    (b'"{}"', "expected object, got str"),
    (b'{"mystery": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"mystery": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "nested too deeply"),
]
STREAMS = {path: one for path, one in ROUTES.items() if one.long}


def limited(max_bytes: int = MAX_BYTES) -> Any:
    return echo_server(
        ECHO, config=replace(CONFIG, limits=ServiceLimits(max_request_bytes=max_bytes))
    )


async def still_serves(server: RunningServer, path: str, posted: Posted) -> None:
    await server.idle()
    assert (await exchange(server.http_port, posted.request(path))).status == 200


def not_json(whole: bytes) -> Iterator[tuple[bytes, str]]:
    """Bodies that no route takes; `whole` is one that it does."""
    yield from BODIES
    yield whole + b" x", "is not JSON"
    yield from ((whole[:end], "is not JSON") for end in range(1, len(whole), 5))


@pytest.mark.parametrize("path", ROUTES)
@asynchronous
async def test_what_is_no_json_object_is_refused(path: str) -> None:
    posted = ROUTES[path]
    async with limited() as server:
        for body, said in not_json(json.dumps(posted.document).encode()):
            answer = await exchange(server.http_port, post(path, body))
            assert answer.status == posted.status, (body[:60], answer.body[:200])
            message = posted.message(answer)
            assert said in message, (body[:60], message)
            assert len(message) < 1100 and "\n" not in message
        await still_serves(server, path, posted)


@pytest.mark.parametrize("path", ROUTES)
@asynchronous
async def test_what_is_too_large_or_something_else_is_refused(path: str) -> None:
    posted = ROUTES[path]
    whole = posted.request(path)
    head = post(path, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunks = (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 10 + b"0\r\n\r\n"
    wrong = [
        (post(path, b" " * (MAX_BYTES + 1)), 413, "body: has 524289 bytes"),
        (head + chunks, 413, "body: has more than 524288 bytes"),
        (whole.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"), 415, "Content-Enc"),
        (
            whole.replace(b"application/json", b"text/plain\r\nOrigin: http://evil.example"),
            415,
            "Content-Type: is 'text/plain'",
        ),
    ]
    async with limited() as server:
        for request, status, said in wrong:
            answer = await exchange(server.http_port, request)
            assert answer.status == status, answer.body
            assert said in posted.message(answer), answer.body
        await still_serves(server, path, posted)


@pytest.mark.parametrize("path", ROUTES)
@asynchronous
async def test_a_sender_that_is_too_slow_is_told(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtc.runtime.service.intake.READ_S", 0.2)
    posted = ROUTES[path]
    async with limited() as server:
        answer = await exchange(server.http_port, posted.request(path)[:-1])
        assert "did not come whole within 0.2 s" in posted.message(answer)
        await still_serves(server, path, posted)


@pytest.mark.parametrize("path", STREAMS)
@asynchronous
async def test_a_client_may_leave_at_every_byte_of_its_answer(path: str) -> None:
    """Before the head, in it, in a chunk's length, in an event."""
    request = STREAMS[path].request(path, **STREAMS[path].long)
    async with echo_server(SLOWER) as server:
        for num_bytes in range(0, 600, 43):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
            writer.write(request)
            async with asyncio.timeout(30):
                await reader.readexactly(num_bytes)
            writer.transport.abort() if num_bytes % 2 else writer.close()
        await server.idle()
        await eventually(lambda: server.server.service.num_open == 0, "requests end")
        await eventually(lambda: connections(server) == 0, "connections end")


@pytest.mark.parametrize("path", STREAMS)
@asynchronous
async def test_requests_may_follow_a_stream_on_its_connection(path: str) -> None:
    """Also those that were sent before it ended, and one that is wrong among them."""
    posted = STREAMS[path]
    async with echo_server(ECHO) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        streamed = json.loads(json.dumps(posted.long).replace("900", "30"))
        long = posted.request(path, **streamed)
        writer.write(long + posted.request(path) + post(path, b"{") + posted.request(path))
        async with asyncio.timeout(60):
            statuses = [(await read_answer(reader)).status for _ in range(4)]
        assert statuses == [200, 200, posted.status, 200]
        writer.close()


def connections(server: RunningServer) -> int:
    return sum(
        one.laddr.port == server.http_port and one.status == "ESTABLISHED"
        for one in psutil.Process().net_connections("tcp")
    )
