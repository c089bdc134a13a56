"""The audit log of a server: one line a request, whatever becomes of it, and nothing lost at the
end."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import (
    CONFIG,
    TOKENIZER,
    EchoEngine,
    RunningServer,
    echo_process,
    echo_server,
)
from trtc.protos.errors import (
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    ServeError,
)
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.host.line_log import LineLogConfig
from trtc.runtime.server.app import ServerConfig
from trtc.runtime.service.access import AccessConfig
from trtc.runtime.service.api_keys import ApiKey, KeyFile, Tenant, hash_of
from trtc.runtime.service.audit import AuditConfig, Entry, encode
from trtc.runtime.service.exposition import Exposition

TEXT = EchoEngine(EchoOptions(vocab_size=4096), TOKENIZER)
SLOW = EchoEngine(EchoOptions(step_s=0.01))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def config(path: Path, *, has_content: bool = False, **sizes: int) -> ServerConfig:
    return replace(CONFIG, audit=AuditConfig(LineLogConfig(path, **sizes), has_content))


@contextlib.asynccontextmanager
async def serving(
    engine: EchoEngine, config: ServerConfig
) -> AsyncIterator[tuple[RunningServer, AsyncClient]]:
    async with (
        echo_server(engine, config=config) as server,
        AsyncClient(server.address, timeout=20) as client,
    ):
        yield server, client


@asynchronous
async def test_a_line_says_who_when_what_and_how_long(path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    alice = Tenant(keys=(ApiKey("a", hash_of("key")),))
    keys.write_bytes(msgspec.json.encode(KeyFile(tenants={"alice": alice})))
    keyed = replace(config(path), access=AccessConfig(keys))
    prompt = list(range(40, 80))
    async with echo_server(config=keyed) as server:
        async with AsyncClient(server.address, api_key="key", timeout=20) as client:
            for request_id in ("first", "second"):
                options = {"max_tokens": 5, "ignore_eos": True, "request_id": request_id}
                await client.generate(prompt, **options).result()  # type: ignore[call-overload]
        digest = server.handle().manifest.digest
    first, second = lines(path)
    assert list(first) == list(Entry.__struct_fields__)[:14], "no content"
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (first["request_id"], second["request_id"]) == ("first", "second")
    for line in (first, second):
        assert line["client"] == "tenant alice"
        assert (line["model"], line["digest"]) == ("echo", digest)
        assert (line["outcome"], line["finish_reasons"]) == ("ok", ["length"])
        assert (line["prompt_tokens"], line["completion_tokens"]) == (40, 5)
        assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"] < 20
    assert first["cached_prompt_tokens"] == 0 < second["cached_prompt_tokens"]


@asynchronous
async def test_every_end_of_a_request_is_an_outcome(path: Path) -> None:
    limited = replace(config(path), engine=replace(CONFIG.engine, max_queue=1))
    narrow = EchoEngine(replace(SLOW.options, max_batch_size=1))
    async with serving(narrow, limited) as (server, client):
        with pytest.raises(InvalidRequestError):
            await client.generate([1], max_tokens=0, request_id="bad").result()
        with pytest.raises(DeadlineError):
            late = client.generate([1], max_tokens=900, timeout=0.2, request_id="late")
            await late.result()
        left = client.generate([1], max_tokens=900, ignore_eos=True, request_id="left")
        await anext(aiter(left))
        waiting = client.generate([1], max_tokens=900, ignore_eos=True, request_id="aborted")
        await eventually(lambda: server.handle().loop.stats().waiting == 1, "it waits")
        with pytest.raises(QueueFullError):
            await client.generate([1], request_id="refused").result()
        left.cancel()
        await anext(aiter(waiting))
        await client.abort("aborted")
        await waiting.result()
        await eventually(lambda: len(lines(path)) == 5, "all have ended")
    found = {line["request_id"]: line for line in lines(path)}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "bad": "InvalidRequestError",
        "late": found["late"]["outcome"],
        "left": "left",
        "refused": "QueueFullError",
        "aborted": "ok",
    }
    assert found["late"]["outcome"] in ("DeadlineError", "left"), "gRPC's timer, or the engine's"
    assert found["aborted"]["finish_reasons"] == ["aborted"]
    assert found["left"]["completion_tokens"] > 0
    assert found["refused"]["total_s"] < 10
    assert found["refused"]["first_token_s"] is found["bad"]["queue_s"] is None


@asynchronous
async def test_content_is_recorded_only_when_asked(path: Path) -> None:
    secret = "correct horse battery staple"

    async def ask(client: AsyncClient) -> str:
        result = await client.generate(secret, max_tokens=8, ignore_eos=True).result()
        await client.chat([{"role": "user", "content": secret}], max_tokens=2).result()
        await client.generate([5, 6], max_tokens=2, n=2, temperature=1.0).result()
        with pytest.raises(InvalidRequestError):
            await client.generate(secret, logprobs=99_999).result()
        return result.text

    async with serving(TEXT, config(path)) as (_, client):
        text = await ask(client)
    assert len(lines(path)) == 4
    assert not any({"prompt", "completions"} & set(line) for line in lines(path))
    for word in (*secret.split(), text):
        assert word not in path.read_text()

    path.unlink()
    async with serving(TEXT, config(path, has_content=True)) as (_, client):
        text = await ask(client)
    one, chat, ids, refused = lines(path)
    assert (one["prompt"], one["completions"]) == (secret, [text])
    assert chat["prompt"]["messages"][0]["role"] == "user"
    assert secret in json.dumps(chat["prompt"])
    assert ids["prompt"] == [5, 6]
    assert len(ids["completions"]) == 2
    assert (refused["prompt"], refused["completions"]) == (secret, [])


def test_text_that_is_no_utf_8_is_written_without_what_is_not() -> None:
    entry = Entry("", "\ud800", "client", "m", "d", prompt={"a\udfff": ["\ud800x"]})
    written = json.loads(encode(entry))
    assert (written["request_id"], written["prompt"]) == ("?", {"a?": ["?x"]})


@asynchronous
async def test_requests_go_on_while_the_disk_does_not_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, write = threading.Event(), os.write
    monkeypatch.setattr(
        "trtc.runtime.host.line_log.os.write",
        lambda descriptor, data: answers.wait(30) and write(descriptor, data),
    )
    async with serving(EchoEngine(), config(path, max_queued_bytes=1000)) as (server, client):
        for _ in range(20):
            await client.generate([1], max_tokens=2, ignore_eos=True).result()
        metrics = generate_latest(Exposition(server.server.metrics).registry).decode()
        answers.set()
        await eventually(lambda: '"event":"lost"' in path.read_text(), "the rest is written")
    lost = re.search(r"^trtc_audit_lost_total (\S+)$", metrics, re.MULTILINE)
    assert lost is not None
    *written, last = lines(path)
    assert (last["event"], last["records"]) == ("lost", float(lost[1]))
    assert len(written) + last["records"] == 20


@asynchronous
async def test_a_log_that_cannot_be_written_keeps_the_server_from_starting(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be opened") as caught:
        async with echo_server(config=config(tmp_path / "none" / "audit.jsonl")):
            pass
    assert caught.value.field == str(tmp_path / "none" / "audit.jsonl")


@pytest.mark.parametrize("num_signals", [1, 2])
def test_nothing_is_lost_when_the_server_is_told_to_end(num_signals: int, path: Path) -> None:
    """Of 100 requests many have ended at SIGTERM, and others run; a second SIGTERM ends those. Each
    has a line, which says what its client was told."""

    async def storm(address: str, send_signal: Callable[[int], None]) -> dict[str, str]:
        told: dict[str, str] = {}
        async with AsyncClient(address, timeout=60) as client:

            async def ask(name: str, max_tokens: int) -> None:
                started = client.generate(
                    [1], max_tokens=max_tokens, ignore_eos=True, request_id=name
                )
                try:
                    await started.result()
                    told[name] = "ok"
                except ServeError as error:
                    told[name] = type(error).__name__

            long = [asyncio.create_task(ask(f"long {one}", 80)) for one in range(30)]
            await asyncio.gather(*(ask(f"short {one}", 3) for one in range(70)))
            for _ in range(num_signals):
                send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
            await asyncio.gather(*long)
        return told

    with echo_process("--step-s", "0.01", "--audit-log", str(path)) as server:
        told = asyncio.run(storm(server.address, server.process.send_signal))
        assert server.process.wait(timeout=30) == 0
    found = lines(path)
    assert len(found) == len(told) == 100
    assert {line["request_id"]: line["outcome"] for line in found} == told
