"""Paths and methods that no route has: the error is in the words of the protocol whose paths are
nearest, so that its clients can read it."""

import asyncio

import pytest
from anthropic import NotFoundError as AnthropicNotFoundError
from ollama import ResponseError
from openai import NotFoundError

from tests.support.aio import asynchronous
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.http1 import exchange, post
from tests.support.http_routes import ROUTES
from tests.support.ollama_client import ollama_client
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import echo_server

NEAREST = {
    "/v1/embeddings": "/v1/completions",
    "/v1/responses/resp_1/cancel": "/v1/responses",
    "/v1/messages/batches": "/v1/messages",
    "/api/embed": "/api/chat",
    "/v2/nothing": "/v2/models/echo/infer",
    "/generate/nothing": "/generate",
}
"""A path that nothing answers -> one of the same protocol."""


@pytest.mark.parametrize("method", ["GET", "PUT"])
@asynchronous
async def test_another_method_is_refused_and_the_right_one_is_named(method: str) -> None:
    async with echo_server(ECHO) as server:
        for path, posted in ROUTES.items():
            if method == "GET" and (path == "/" or path.startswith("/v2/models/")):
                continue  # the page; a model's other questions
            answer = await exchange(
                server.http_port, post(path, b"{}").replace(b"POST", method.encode(), 1)
            )
            assert answer.status == 405, path
            assert "POST" in answer.headers["allow"]
            said = posted.message(answer)
            assert said.startswith(f"{method} {path}: the path has another method. Send "), said


@asynchronous
async def test_an_unknown_path_is_refused_in_the_words_of_its_protocol() -> None:
    async with echo_server(ECHO) as server:
        for path, near in NEAREST.items():
            answer = await exchange(server.http_port, post(path, b"{}"))
            assert answer.status == 404, path
            said = ROUTES[near].message(answer)
            assert said.startswith(f"POST {path}: there is no such path. Ask for one of /"), said
            assert len(said) < 500
        long = await exchange(server.http_port, post(f"/v1/{'x' * 5000}", b"{}"))
        assert (long.status, len(long.body) < 700) == (404, True)


@asynchronous
async def test_clients_show_what_is_wrong() -> None:
    async with (
        echo_server(ECHO) as server,
        sdk(server) as openai,
        anthropic_sdk(server) as anthropic,
        ollama_client(server) as ollama,
    ):
        with pytest.raises(NotFoundError, match="POST /v1/embeddings: there is no such path"):
            await openai.embeddings.create(model="echo", input="a")
        with pytest.raises(AnthropicNotFoundError, match="Ask for one of /v1/messages"):
            await anthropic.messages.batches.list()
        with pytest.raises(ResponseError, match=r"^POST /api/embed: there is no such path"):
            await ollama.embed("echo", "a")


@asynchronous
async def test_what_can_be_got_has_a_head() -> None:
    """Load balancers and monitors ask for it."""
    async with echo_server(ECHO) as server:
        for path in ("/v1/models", "/v1/models/echo", "/api/version", "/readyz", "/v2", "/metrics"):
            answers = []
            for method in ("GET", "HEAD"):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
                head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                answers.append((await reader.read()).partition(b"\r\n\r\n"))
                writer.close()
            (got, _, body), (head_alone, _, nothing) = answers
            assert got.split(b"\r\n")[0] == head_alone.split(b"\r\n")[0] == b"HTTP/1.1 200 OK", path
            assert body and not nothing
        answer = await exchange(server.http_port, post("/v1/models", b"{}"))
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
