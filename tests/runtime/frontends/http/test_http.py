"""Clients of the HTTP port that send or take slowly, or come in numbers."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import CONFIG, echo_process, echo_server
from trtc.runtime.frontends.http.application import RESERVED_CONNECTIONS
from trtc.runtime.frontends.http.connections import BoundedConnection
from trtc.runtime.service.limits import ServiceLimits

CONNECTIONS = "trtc.runtime.frontends.http.connections"
HEADERS = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open sockets; the server may close them at any time."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(count)
        ]


def is_alive(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        return json.load(answer) == {"status": "alive"}


def drip(client: socket.socket, data: bytes, every_s: float) -> float:
    """Send a byte at a time until the server closes the connection; seconds that took."""
    begin = time.monotonic()
    client.settimeout(every_s)
    for byte in data:
        try:
            client.sendall(bytes([byte]))
            if client.recv(1 << 16) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        raise AssertionError("the server took all of it")
    return time.monotonic() - begin


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(HEADERS, id="half of its headers"),
        pytest.param(HEADERS + b"Content-Length: 99\r\n\r\n", id="headers without the body"),
        pytest.param(HEADERS + b"\r\n", id="a whole request, and no second one"),
    ],
)
@asynchronous
async def test_a_connection_that_waits_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(f"{CONNECTIONS}.HEAD_S", 0.3)
    monkeypatch.setattr(f"{CONNECTIONS}.IDLE_S", 0.3)
    async with echo_server() as server:
        port = server.http_port
        assert port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()


@pytest.mark.parametrize(
    "head", [b"", HEADERS + b"Content-Length: 9999\r\n\r\n"], ids=["headers", "body"]
)
@asynchronous
async def test_a_byte_now_and_then_does_not_prolong_a_connection(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(f"{CONNECTIONS}.HEAD_S", 0.5)
    async with echo_server() as server:
        port = server.http_port
        assert port is not None
        with connections(port, 1) as (client,):
            client.sendall(head)
            await asyncio.to_thread(drip, client, HEADERS + b"X: " + b"y" * 500, 0.05)


@asynchronous
async def test_slow_clients_take_no_threads_and_keep_no_probe_out() -> None:
    config = replace(CONFIG, limits=ServiceLimits(max_connections=64))
    most = 64 + RESERVED_CONNECTIONS
    async with echo_server(config=config) as server:
        port = server.http_port
        assert port is not None
        with contextlib.ExitStack() as stack:
            for _ in range(8):  # a few at a time, as all of this is in the server's own loop
                opened = connections(port, most // 4)
                clients = stack.enter_context(opened)
                for client in clients:
                    with contextlib.suppress(OSError):  # those already replaced
                        client.sendall(HEADERS)
                await asyncio.sleep(0.05)
            threads = threading.active_count()
            assert await asyncio.to_thread(is_alive, port)
            assert threading.active_count() <= threads + 1, "of the probe itself"
            held = [
                one
                for one in psutil.Process().net_connections("tcp")
                if one.status == "ESTABLISHED"
            ]
            accepted = [one for one in held if one.laddr.port == port]
            assert len(accepted) <= most


@asynchronous
async def test_a_client_that_takes_no_response_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long everything takes: it is accepted, and then it is lost."""
    monkeypatch.setattr(f"{CONNECTIONS}.STALLED_CLIENT_S", 1.0)
    seen: list[str] = []
    for event in ("connection_made", "connection_lost"):
        monkeypatch.setattr(BoundedConnection, event, noting(seen, event))
    async with echo_server() as server:
        port = server.http_port
        assert port is not None
        with connections(port, 1) as (client,):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
            with contextlib.suppress(OSError):
                # Pipelined, and no response is read.
                await asyncio.to_thread(client.sendall, request)
            await eventually(lambda: len(seen) == 2, "the connection was closed", 120)
    assert seen == ["connection_made", "connection_lost"]


def noting(seen: list[str], event: str) -> Callable[..., None]:
    """The method of connections, which adds its name to `seen`."""
    method = getattr(BoundedConnection, event)

    def noted(self: BoundedConnection, *arguments: Any) -> None:
        seen.append(event)
        method(self, *arguments)

    return noted


@asynchronous
async def test_only_get_and_head_are_answered() -> None:
    async with echo_server() as server:
        port = server.http_port
        assert port is not None
        for method, status in (("HEAD", b"200"), ("POST", b"405"), ("DELETE", b"405")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"{method} /healthz HTTP/1.1\r\nHost: localhost\r\n".encode()
                + b"Connection: close\r\n\r\n"
            )
            answer = await reader.read()
            writer.close()
            assert answer.split()[1] == status
            assert answer.endswith(b"\r\n\r\n") == (method == "HEAD")


def test_slow_http_clients_do_not_keep_a_server_from_ending() -> None:
    with echo_process() as server, contextlib.ExitStack() as stack:
        port = _http_port(server.process.pid, server.address)
        clients = stack.enter_context(connections(port, 20))
        stop = threading.Event()

        def send_slowly() -> None:
            while not stop.wait(0.05):
                for client in clients:
                    with contextlib.suppress(OSError):
                        client.sendall(b"X")

        thread = threading.Thread(target=send_slowly)
        thread.start()
        try:
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=30) == 0
        finally:
            stop.set()
            thread.join()


def _http_port(pid: int, grpc_address: str) -> int:
    listening = {
        one.laddr.port
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == "LISTEN"
    }
    (port,) = listening - {int(grpc_address.rpartition(":")[2])}
    return int(port)
