"""A protocol of a test's own, in thirty lines: what a frontend owes, and what it gets for it."""

import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from tests.support.aio import asynchronous
from tests.support.servers import CONFIG, RunningServer, echo_server, greedy
from trtc.protos.errors import TrtcError
from trtc.runtime.client import AsyncClient
from trtc.runtime.frontends.base import Frontend, is_loopback, url_host
from trtc.runtime.frontends.grpc.frontend import GrpcConfig
from trtc.runtime.requests.principal import connection
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.service import Service

PROMPT = (5, 17, 9)
NUM_TOKENS = 12


class LinesFrontend(Frontend):
    """A prompt is a line of token ids; the answer a line of tokens for each event, then `end` or
    the name of an error."""

    name: ClassVar[str] = "lines"

    def __init__(self, service: Service) -> None:
        super().__init__("127.0.0.1")
        self._service = service
        self._server: asyncio.Server | None = None
        self.drained = False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def drain(self) -> None:
        self.drained = True

    async def close(self, grace_s: float) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = connection("lines", self.host)
        try:
            ids = tuple(map(int, (await reader.readline()).split()))
            request_input = RequestInput(
                token_ids=ids, max_tokens=NUM_TOKENS, sampling={"temperature": 0.0}
            )
            async with self._service.generate(request_input, principal=caller) as stream:
                async for outputs in stream:
                    for output in outputs:
                        writer.write(" ".join(map(str, output.token_ids)).encode() + b"\n")
            writer.write(b"end\n")
        except TrtcError as error:
            writer.write(type(error).__name__.encode() + b"\n")
        finally:
            writer.close()


@dataclass(frozen=True)
class LinesConfig:
    def frontend(self, service: Service) -> LinesFrontend:
        return LinesFrontend(service)


BOTH = replace(CONFIG, frontends=(LinesConfig(), GrpcConfig(port=0)))


async def ask(server: RunningServer, prompt: bytes) -> list[str]:
    host, _, port = server.server.frontends["lines"].address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(prompt + b"\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return lines


@asynchronous
async def test_the_same_input_gives_the_same_tokens_by_every_frontend() -> None:
    async with echo_server(config=BOTH) as server, AsyncClient(server.address) as client:
        *events, end = await ask(server, b"5 17 9")
        told = [int(token) for event in events for token in event.split()]
        assert (told, end) == (greedy(PROMPT, NUM_TOKENS), "end")
        result = await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0).result()
        assert list(result.token_ids) == told


@asynchronous
async def test_a_refusal_is_the_services_in_the_frontends_words() -> None:
    async with echo_server(config=BOTH) as server:
        assert await ask(server, b"999999") == ["InvalidRequestError"]


@asynchronous
async def test_frontends_are_drained_and_closed_with_the_server() -> None:
    async with echo_server(config=BOTH) as server:
        lines = server.server.frontends["lines"]
        assert isinstance(lines, LinesFrontend)
        assert not lines.drained
        ports = [one.port for one in server.server.frontends.values()]
    assert lines.drained
    for port in ports:
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "shown", "is_own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "[::1]", True),
        ("localhost", "localhost", True),
        ("0.0.0.0", "0.0.0.0", False),
        ("example.org", "example.org", False),
    ],
)
def test_hosts(host: str, shown: str, is_own: bool) -> None:
    assert (url_host(host), is_loopback(host)) == (shown, is_own)
