"""The page's files and its data on the wire. In a browser: tests/browser."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from tests.support.aio import asynchronous
from tests.support.http1 import Answer, exchange, post
from tests.support.keys import holding, write_keys
from tests.support.openai_sdk import ECHO
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.frontends.http.page.files import page_files
from trtc.runtime.frontends.http.port import HttpConfig
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.access import AccessConfig

STATUS = "/trtc/status"
ASKED = json.dumps({"model": "echo", "prompt": "def", "max_tokens": 4, "ignore_eos": True}).encode()


async def get(server: RunningServer, path: str, *headers: str) -> Answer:
    lines = (f"GET {path} HTTP/1.1", "Host: localhost", *headers)
    return await exchange(server.http_port, "\r\n".join(lines).encode() + b"\r\n\r\n")


@asynchronous
async def test_the_page_loads_what_it_names_and_nothing_else() -> None:
    files = page_files()
    named = re.findall(rb'(?:src|href)="(?!#)([^"]+)"', files["index.html"].content)
    for one in files.values():
        assert b"http://" not in one.content.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in one.content
        named += [
            f"/trtc/page/{name}".encode()
            for name in re.findall(r'from "\./(.+?)"', str(one.content))
        ]
    async with echo_server() as server:
        for path in {name.decode() for name in named}:
            assert (await get(server, path)).status == 200, path


@asynchronous
async def test_browsers_are_told_to_be_strict() -> None:
    async with echo_server() as server:
        for path in ("/", "/trtc/page/main.js"):
            headers = (await get(server, path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        assert (await get(server, "/")).headers["content-type"] == "text/html; charset=utf-8"


@asynchronous
async def test_files_that_a_browser_has_are_not_sent_again() -> None:
    async with echo_server() as server:
        first = await get(server, "/trtc/page/style.css")
        tag = first.headers["etag"]
        for known in (tag, f'"x", W/{tag}'):
            request = (
                f"GET /trtc/page/style.css HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: {known}"
            )
            answer = await exchange_without_body(server, request)
            assert answer.startswith(b"HTTP/1.1 304"), known
            assert tag.encode() in answer
        assert (await get(server, "/trtc/page/style.css", 'If-None-Match: "x"')).status == 200


async def exchange_without_body(server: RunningServer, request: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    writer.write(f"{request}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert not body
    return head


@asynchronous
async def test_the_status_tells_of_a_request() -> None:
    async with echo_server(ECHO) as server:
        answer = await exchange(server.http_port, post("/v1/completions", ASKED))
        assert answer.status == 200
        activity = server.server.service.activity
        activity.sample({"echo": server.handle().loop.stats()})
        told = (await get(server, STATUS)).document
        (engine,) = told["engines"]
        assert engine["digest"] == server.handle().manifest.digest
        assert told["states"] == [
            {"name": "echo", "state": "READY", "reason": "", "is_wanted": True}
        ]
        (ended,) = told["ended"]
        assert (ended["request_id"], ended["outcome"]) == (answer.document["id"], "ok")
        assert ended["completion_tokens"] == len(ended["marks"]) == 4
        assert 0 <= ended["admitted_s"] <= ended["scheduled_s"] <= ended["first_token_s"]
        assert ended["first_token_s"] <= ended["last_token_s"] <= ended["ended_s"]
        (client,) = told["clients"]
        assert (client["name"], client["completion_tokens"]) == ("anonymous", 4)
        row = dict(zip(told["columns"], told["samples"][-1]["engines"]["echo"], strict=True))
        assert row["first_token_p50"] == pytest.approx(ended["first_token_s"], rel=0.03)
        assert row["finished"] > 0
        assert "prompt" not in ended
        after = (await get(server, f"{STATUS}?after={told['num_samples']}")).document
        assert (len(after["samples"]), len(after["ended"])) == (0, 0)


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 16, "%C2%B2"])
@asynchronous
async def test_an_excerpt_begins_at_a_number(after: str) -> None:
    async with echo_server() as server:
        answer = await get(server, f"{STATUS}?after={after}")
        assert answer.status == 400
        assert answer.document["status"].startswith("after: is ")


@asynchronous
async def test_the_status_needs_the_scope_of_metrics(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, {"alice": holding("a"), "ops": holding("o", scopes=(Scope.METRICS,))})
    async with echo_server(config=replace(CONFIG, access=AccessConfig(path))) as server:
        assert (await get(server, "/")).status == 200
        assert (await get(server, STATUS)).status == 401
        assert (await get(server, STATUS, "Authorization: Bearer a")).status == 403
        assert (await get(server, STATUS, "Authorization: Bearer o")).status == 200


@asynchronous
async def test_without_a_page_there_is_no_status() -> None:
    grpc, http = CONFIG.frontends
    assert isinstance(http, HttpConfig)
    config = replace(CONFIG, frontends=(grpc, replace(http, has_page=False)))
    async with echo_server(config=config) as server:
        assert (await get(server, "/")).status == 405  # TGI answers a POST
        assert (await get(server, STATUS)).status == 404
