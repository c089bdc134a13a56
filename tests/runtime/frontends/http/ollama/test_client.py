"""What the unmodified `ollama` client asks and reads, against the engine in this process."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import ollama
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.http1 import exchange, post
from tests.support.ollama_client import ollama_client
from tests.support.openai_sdk import ECHO, SLOW
from tests.support.servers import TOKENIZER, EchoEngine, RunningServer, echo_server
from trtc.protos.sampling import SamplingDefaults
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.completion import Result
from trtc.runtime.text.tokenizer import Tokenizer
from trtc.version import __version__

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "def f("},
]
OPTIONS: Mapping[str, Any] = {"num_predict": 12, "seed": 7, "temperature": 0.9, "top_p": 0.8}
SAMPLED: Mapping[str, Any] = {"max_tokens": 12, "seed": 7, "temperature": 0.9, "top_p": 0.8}


async def over_grpc(server: RunningServer, prompt: Any, **asked: Any) -> Result:
    """The same over trtc.v1: the oracle."""
    async with AsyncClient(server.address) as client:
        ask: Any = client.generate if isinstance(prompt, str) else client.chat
        return await ask(prompt, **asked).result()  # type: ignore[no-any-return]


@asynchronous
async def test_a_chat_is_answered_whole() -> None:
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        expected = await over_grpc(server, MESSAGES, **SAMPLED)
        before = time.monotonic_ns()
        answer = await client.chat("echo", MESSAGES, options=OPTIONS)
        took = time.monotonic_ns() - before
        assert (answer.message.role, answer.message.content) == ("assistant", expected.text)
        assert (answer.model, answer.done, answer.done_reason) == ("echo", True, "length")
        assert answer.prompt_eval_count == expected.usage.prompt_tokens
        assert (answer.eval_count, answer.load_duration) == (12, 0)
        told = (answer.prompt_eval_duration, answer.eval_duration, answer.total_duration)
        assert all(one is not None for one in told)
        assert 0 < answer.prompt_eval_duration <= answer.total_duration < took
        assert answer.prompt_eval_duration + answer.eval_duration == answer.total_duration
        moment = datetime.fromisoformat(answer.created_at or "")
        assert abs((datetime.now(UTC) - moment).total_seconds()) < 60


@asynchronous
async def test_a_chat_is_streamed() -> None:
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        expected = await over_grpc(server, MESSAGES, **SAMPLED)
        stream = await client.chat("echo", MESSAGES, options=OPTIONS, stream=True)
        *told, last = [one async for one in stream]
        assert [one.done for one in told] == [False] * len(told) and len(told) > 4
        assert "".join(one.message.content or "" for one in told) == expected.text
        assert (last.message.content, last.done, last.done_reason) == ("", True, "length")
        assert (last.eval_count, told[0].eval_count) == (12, None)


@asynchronous
async def test_a_prompt_is_the_users_message_unless_it_is_raw() -> None:
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        whole = await over_grpc(server, "def f(", **SAMPLED)
        answer = await client.generate("echo", "def f(", raw=True, options=OPTIONS)
        assert answer.response == whole.text
        asked = await over_grpc(server, MESSAGES, **SAMPLED)
        answer = await client.generate("echo", "def f(", system="Be brief.", options=OPTIONS)
        assert answer.response == asked.text != whole.text
        stream = await client.generate("echo", "def f(", stream=True, raw=True, options=OPTIONS)
        assert "".join([one.response or "" async for one in stream]) == whole.text


@asynchronous
async def test_a_prompt_to_a_model_without_a_chat_template_is_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "has_chat_template", False)
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        expected = await over_grpc(server, "def f(", **SAMPLED)
        answer = await client.generate("echo", "def f(", options=OPTIONS)
        assert answer.response == expected.text


@asynchronous
async def test_every_option_is_read() -> None:
    options = {**OPTIONS, "top_k": 40, "min_p": 0.01, "repeat_penalty": 1.3}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": -5}
    theirs = {**SAMPLED, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.3}
    theirs |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 2**64 - 5}
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        expected = await over_grpc(server, MESSAGES, **theirs)
        answer = await client.chat("echo", MESSAGES, options=options)
        assert answer.message.content == expected.text
        stop = expected.text[4:7]
        for given in (stop, [stop, "never"]):
            answer = await client.chat("echo", MESSAGES, options={**options, "stop": given})
            assert answer.message.content == expected.text.partition(stop)[0]
            assert answer.done_reason == "stop"


@asynchronous
async def test_what_is_left_to_the_server_is_its_own() -> None:
    """num_predict -1 and -2: as many as fit; seed -1: a new one each time."""
    small = replace(ECHO, options=replace(ECHO.options, max_seq_len=64))
    async with echo_server(small) as server, ollama_client(server) as client:
        texts = set()
        for limit in (-1, -2):
            answer = await client.generate(
                "echo", "a", raw=True, options={"num_predict": limit, "seed": -1}
            )
            assert (answer.prompt_eval_count or 0) + (answer.eval_count or 0) == 64
            texts.add(answer.response)
        assert len(texts) == 2


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_logprobs_are_told(stream: bool) -> None:
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        expected = await over_grpc(server, MESSAGES, logprobs=2, **SAMPLED)
        answer = await client.chat(
            "echo", MESSAGES, options=OPTIONS, logprobs=True, top_logprobs=2, stream=stream
        )
        answers = [one async for one in answer] if stream else [answer]
        told = [entry for one in answers for entry in one.logprobs or ()]
        assert [(one.token, one.logprob) for one in told] == [
            (one.text, one.logprob) for one in expected.logprobs
        ]
        assert [[other.logprob for other in one.top_logprobs or ()] for one in told] == [
            [value for _, value in one.top] for one in expected.logprobs
        ]


@asynchronous
async def test_asking_for_nothing_says_that_the_model_is_loaded() -> None:
    async with echo_server(ECHO) as server, ollama_client(server) as client:
        for keep_alive in (None, 0, -1, "5m"):
            answer = await client.generate("echo", keep_alive=keep_alive)
            assert (answer.done, answer.done_reason, answer.response) == (True, "load", "")
            chat = await client.chat("echo", keep_alive=keep_alive)
            assert (chat.done_reason, chat.message.content) == ("load", "")
        assert [one.name for one in (await client.ps()).models] == ["echo"], "it stays loaded"
        with pytest.raises(ollama.ResponseError, match="no engine is called 'other'") as caught:
            await client.generate("other")
        assert caught.value.status_code == 404


@asynchronous
async def test_models_are_listed_and_shown() -> None:
    engine = EchoEngine(
        ECHO.options, TOKENIZER, sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20)
    )
    async with echo_server(engine, names=("a", "b/c")) as server, ollama_client(server) as client:
        listed = (await client.list()).models
        assert [one.model for one in listed] == ["a", "b/c"]
        manifest = server.handle("a").manifest
        assert listed[0].digest == manifest.digest
        assert listed[0].details is not None and listed[0].details.quantization_level == "fp32"
        running = (await client.ps()).models
        assert [one.context_length for one in running] == [1024, 1024]
        pool = manifest.ledger.page * server.handle("a").num_pages
        assert (running[0].size, running[0].size_vram) == (pool, 0)
        for name in ("b/c", "b/c:latest"):
            shown = await client.show(name)
            assert shown.modelinfo is not None
            assert shown.modelinfo["echo.context_length"] == 1024
            assert shown.capabilities == ["completion"]
            assert set((shown.parameters or "").splitlines()) == {"temperature 0.6", "top_k 20"}
        with pytest.raises(ollama.ResponseError, match="no engine is called 'd'") as caught:
            await client.show("d")
        assert caught.value.status_code == 404
        answer = await client.generate("a:latest", "x", options={"num_predict": 1})
        assert answer.model == "a"


@asynchronous
async def test_the_version_is_that_of_the_server() -> None:
    async with echo_server(ECHO) as server:
        request = b"GET /api/version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await exchange(server.http_port, request)).document == {"version": __version__}


@asynchronous
async def test_curl_may_call_a_body_a_form_and_a_page_may_not() -> None:
    body = b'{"model": "echo", "prompt": "a", "options": {"num_predict": 2, "num_ctx": 9}, "x": 1}'
    request = post("/api/generate", body).replace(
        b"application/json", b"application/x-www-form-urlencoded"
    )
    async with echo_server(ECHO) as server:
        answer = await exchange(server.http_port, request)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.headers["x-trtc-ignored"] == "x, options.num_ctx"
        assert answer.headers["x-request-id"].startswith("ollama-")
        from_page = request.replace(b"Host:", b"Origin: http://evil.example\r\nHost:")
        answer = await exchange(server.http_port, from_page)
        assert answer.status == 415 and "Content-Type" in answer.document["error"]


@asynchronous
async def test_a_client_that_leaves_ends_its_request() -> None:
    async with echo_server(SLOW) as server, ollama_client(server) as client:
        stream = await client.generate("echo", "a", raw=True, stream=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await server.idle()
        asked = client.chat("echo", MESSAGES)
        task = asyncio.ensure_future(asked)
        await eventually(lambda: server.server.service.num_open == 1, "it runs")
        task.cancel()
        await server.idle()


@asynchronous
async def test_an_error_ends_a_stream_as_its_last_line() -> None:
    async with echo_server(SLOW) as server, ollama_client(server) as client:
        stream = await client.generate("echo", "a", raw=True, stream=True)
        assert not (await anext(stream)).done
        await asyncio.to_thread(server.handle().loop.stop)
        with pytest.raises(ollama.ResponseError):
            async for _ in stream:
                pass
