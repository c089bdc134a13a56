"""What a browser asks before it lets a page ask, and what it needs to give the page the answer."""

import json
from dataclasses import replace

import pytest

from tests.support.aio import asynchronous
from tests.support.http1 import Answer, exchange, post
from tests.support.openai_sdk import ECHO
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.frontends.grpc.frontend import GrpcConfig
from trtc.runtime.frontends.http.port import HttpConfig
from trtc.runtime.server.app import ServerConfig

PAGE = "https://chat.example.com"
BODY = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
PATHS = ("/v1/completions", "/v1/chat/completions", "/api/chat", "/v1/messages", "/healthz")
CLOSED = ("/metrics", "/v2/repository/models/echo/load", "/nothing")


def config(*origins: str) -> ServerConfig:
    local = "127.0.0.1"
    frontends = (GrpcConfig(local, 0), HttpConfig(local, 0, cors_origins=origins))
    return replace(CONFIG, frontends=frontends)


def preflight(path: str, origin: str) -> bytes:
    lines = (
        f"OPTIONS {path} HTTP/1.1",
        "Host: localhost",
        f"Origin: {origin}",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization,content-type",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def asked(server: RunningServer, origin: str) -> Answer:
    return await exchange(server.http_port, post("/v1/completions", BODY, f"Origin: {origin}"))


@pytest.mark.parametrize("origins", [(PAGE,), ("http://other", PAGE), ("*",)])
@asynchronous
async def test_a_page_that_is_let_in_reads_answers(origins: tuple[str, ...]) -> None:
    async with echo_server(ECHO, config=config(*origins)) as server:
        for path in PATHS:
            answer = await exchange(server.http_port, preflight(path, PAGE))
            assert (answer.status, answer.body) == (204, b"")
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in answer.headers
        answer = await asked(server, PAGE)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await exchange(server.http_port, post("/v1/completions", b"{", f"Origin: {PAGE}"))
        assert refused.status == 400, "and the reason is read, too"
        assert refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origins", [(), ("https://other.example",)])
@asynchronous
async def test_other_pages_read_nothing(origins: tuple[str, ...]) -> None:
    async with echo_server(ECHO, config=config(*origins)) as server:
        for origin in (PAGE, "null", "https://chat.example.com.evil", "HTTPS://OTHER.EXAMPLE"):
            for path in (*PATHS, *CLOSED):
                answer = await exchange(server.http_port, preflight(path, origin))
                assert answer.status in (404, 405)
                assert not any("access-control" in one for one in answer.headers)
            answer = await asked(server, origin)
            assert not any("access-control" in one for one in answer.headers)


@asynchronous
async def test_no_page_reads_metrics_or_handles_models() -> None:
    async with echo_server(ECHO, config=config("*")) as server:
        for path in CLOSED:
            answer = await exchange(server.http_port, preflight(path, PAGE))
            assert not any("access-control" in one for one in answer.headers), path
        get = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: {PAGE}\r\n\r\n".encode()
        answer = await exchange(server.http_port, get)
        assert answer.status == 200
        assert not any("access-control" in one for one in answer.headers)


@pytest.mark.parametrize("wanted", ["x" * 2000, "a\tb", "a: b"])
@asynchronous
async def test_names_of_headers_are_not_sent_back_unread(wanted: str) -> None:
    request = preflight("/v1/completions", PAGE).replace(
        b"authorization,content-type", wanted.encode()
    )
    async with echo_server(ECHO, config=config(PAGE)) as server:
        answer = await exchange(server.http_port, request)
        assert answer.status == 204
        assert "access-control-allow-headers" not in answer.headers
