"""The blocking client, against a server in a process of its own."""

import asyncio
import gc
import inspect
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import EOS, ServerProcess, echo_process, greedy
from trtc.protos.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
)
from trtc.runtime.client import AsyncClient, Client
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.request import FinishReason

OPTIONS = EchoOptions(num_pages=2048, never=(EOS,))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with echo_process("--step-s", "0.002") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def public_methods(client: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(method).replace(return_annotation=None)
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_clients_are_asked_alike() -> None:
    """They differ in what waits: `wait_ready` is the blocking client's alone."""
    blocking = public_methods(Client)
    assert blocking.pop("wait_ready")
    assert blocking == public_methods(AsyncClient)
    assert len(blocking) >= 9


def test_stream_and_result(client: Client) -> None:
    generation = client.generate([5, 6], max_tokens=30, temperature=0.0)
    first = next(generation)
    assert first.request_id == generation.request_id
    result = generation.result()
    assert list(result.token_ids) == greedy([5, 6], 30, OPTIONS)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.prompt_tokens == 2
    document = result.as_json()
    assert document["token_ids"] == list(result.token_ids)
    assert document["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == 30


def test_a_list_of_prompts_is_a_list_of_generations(server: ServerProcess) -> None:
    prompts = [[number, 7] for number in range(12)]
    expected = [greedy(prompt, 15, OPTIONS) for prompt in prompts]

    async def complete() -> list[list[int]]:
        async with AsyncClient(server.address) as client:
            started = client.generate(prompts, max_tokens=15, temperature=0.0)
            return [list((await one.result()).token_ids) for one in started]

    with Client(server.address) as client:
        started = client.generate(prompts, max_tokens=15, temperature=0.0)
        assert [list(one.result().token_ids) for one in started] == expected
    assert asyncio.run(complete()) == expected


def test_threads_share_a_client(client: Client) -> None:
    def complete(number: int) -> bool:
        result = client.generate([number], max_tokens=15, temperature=0.0).result()
        return list(result.token_ids) == greedy([number], 15, OPTIONS)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(complete, range(64)))


def test_leaving_the_block_cancels(client: Client) -> None:
    with client.generate([1], max_tokens=900, request_id="left") as generation:
        next(generation)
    with pytest.raises(CancelledError):
        generation.result()
    deadline = time.monotonic() + 5
    while True:  # the id is free again as soon as the server has let go of the request
        try:
            client.generate([1], max_tokens=1, request_id="left").result()
            return
        except InvalidRequestError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_dropping_a_generation_cancels(client: Client) -> None:
    generation = client.generate([1], max_tokens=900, request_id="dropped")
    next(generation)
    del generation
    gc.collect()
    deadline = time.monotonic() + 5
    while True:
        try:
            client.abort("dropped")
        except UnknownRequestError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_abort_from_elsewhere(client: Client) -> None:
    generation = client.generate([1], max_tokens=900, request_id="far")
    next(generation)
    client.abort("far")
    assert generation.result().finish_reason is FinishReason.ABORTED


def test_the_clients_timeout_holds_for_each_call(server: ServerProcess) -> None:
    with Client(server.address, timeout=0.2) as client:
        with pytest.raises(DeadlineError):
            client.generate([1], max_tokens=900).result()
        assert client.generate([1], max_tokens=400, timeout=30).result().usage is not None


def test_info(client: Client) -> None:
    (info,) = client.info()
    assert (info.name, info.vocab_size, info.max_seq_len) == ("echo", 512, 1024)
    assert client.info("echo") == (info,)
    with pytest.raises(UnknownModelError):
        client.info("none")


def test_nobody_there_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(UnavailableError, match="trtc serve") as caught:
            client.info()
        assert caught.value.field == f"127.0.0.1:{port}"
        with pytest.raises(UnavailableError, match=r"no connection within 0\.2 s"):
            client.wait_ready(0.2)


def test_a_server_that_is_there_is_waited_for(client: Client) -> None:
    client.wait_ready(10)
