"""Clients of servers that break off or answer nonsense, and clients that were closed."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from tests.support.aio import asynchronous
from tests.support.broken_servers import GARBAGE, broken_server
from tests.support.servers import EOS, EchoEngine, echo_server
from trtc.protos.errors import CancelledError, ServeError, UnavailableError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import AsyncClient, Client
from trtc.runtime.executors.echo import EchoOptions

UNFINISHED = pb.GenerateResponse(request_id="r", token_ids=[1], text="a").SerializeToString()
OVER = pb.GenerateResponse(request_id="r", usage=pb.Usage()).SerializeToString()

REPLIES = {
    "no message": ([], "ended before the completion did"),
    "no last message": ([UNFINISHED], "ended before the completion did"),
    "a sequence without its end": ([UNFINISHED, OVER], "ended before the completion did"),
    "garbage": ([GARBAGE], "reply to Generate cannot be parsed"),
    "garbage after a token": ([UNFINISHED, GARBAGE], "reply to Generate cannot be parsed"),
}


@pytest.mark.parametrize("what", REPLIES)
def test_a_broken_stream_is_one_error(what: str) -> None:
    replies, message = REPLIES[what]

    async def read_asynchronously(address: str) -> None:
        async with AsyncClient(address) as client:
            with pytest.raises(ServeError, match=message):
                await client.generate([1]).result()

    with broken_server(replies) as address:
        with Client(address) as client, pytest.raises(ServeError, match=message):
            client.generate([1]).result()
        asyncio.run(read_asynchronously(address))


def test_a_reply_that_cannot_be_parsed_is_one_error() -> None:
    message = "reply to Tokenize cannot be parsed. Check that the address is that of `trtc serve`"

    async def ask_asynchronously(address: str) -> None:
        async with AsyncClient(address) as client:
            with pytest.raises(ServeError, match=message):
                await client.tokenize("a")

    with broken_server([]) as address:
        with Client(address) as client, pytest.raises(ServeError, match=message):
            client.tokenize("a")
        asyncio.run(ask_asynchronously(address))


def test_the_errors_do_not_rest_on_assertions() -> None:
    """`python -O` removes those."""
    code = (
        "import sys, trtc\n"
        "try:\n"
        "    trtc.Client(sys.argv[1]).generate([1]).result()\n"
        "except trtc.TrtcError as error:\n"
        "    print(error)\n"
    )
    with broken_server([UNFINISHED]) as address:
        said = subprocess.run(
            [sys.executable, "-O", "-c", code, address], capture_output=True, text=True, timeout=60
        )
    assert said.stdout.startswith("the stream ended before the completion did"), said.stderr


def test_a_closed_client_says_so() -> None:
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: client.generate([1]),
        lambda: client.chat([{"role": "user", "content": "a"}]),
        client.info,
        lambda: client.tokenize("a"),
        lambda: client.abort("r"),
        lambda: client.wait_ready(1),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1: the client is closed"):
            call()


@asynchronous
async def test_a_closed_asynchronous_client_says_so() -> None:
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    await client.close()
    with pytest.raises(UnavailableError, match="the client is closed"):
        client.generate([1])
    calls: list[Callable[[], Awaitable[object]]] = [
        client.info,
        lambda: client.tokenize("a"),
        lambda: client.abort("r"),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="the client is closed"):
            await call()


@asynchronous
async def test_closing_a_client_ends_its_generations_with_an_error() -> None:
    """Not with asyncio's CancelledError, which would end the task that reads."""
    slow = EchoOptions(step_s=0.01, never=(EOS,))
    async with echo_server(EchoEngine(slow)) as server:
        client = AsyncClient(server.address)
        generation = client.generate([1], max_tokens=900)
        await anext(generation)
        reading = asyncio.create_task(generation.result())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(CancelledError, match="cancelled by this client"):
            await reading
        await server.idle()
