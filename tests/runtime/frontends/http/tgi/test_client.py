"""What the unmodified InferenceClient asks and reads, against the engine in this process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub.inference._common import ValidationError

from tests.support.aio import asynchronous
from tests.support.http1 import exchange, post
from tests.support.openai_sdk import ECHO, SLOW
from tests.support.servers import EOS, RunningServer, echo_server
from tests.support.tgi_client import tgi_client
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.completion import Result

SAMPLED: Mapping[str, Any] = {"seed": 7, "temperature": 0.9, "top_p": 0.8, "top_k": 50}


async def over_grpc(server: RunningServer, prompt: Any, **asked: Any) -> Result:
    """The same over trtc.v1: the oracle."""
    async with AsyncClient(server.address) as client:
        ask: Any = client.generate if isinstance(prompt, str) else client.chat
        return await ask(prompt, **asked).result()  # type: ignore[no-any-return]


@asynchronous
async def test_a_text_is_answered_whole() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
        for given in ({}, SAMPLED, {**SAMPLED, **penalties}):
            oracle = given or {"temperature": 0.0}
            expected = await over_grpc(server, "def f(", max_tokens=12, **oracle)
            told = await client.text_generation("def f(", max_new_tokens=12, **given)
            assert told == expected.text
            whole = await client.text_generation(
                "def f(", max_new_tokens=12, return_full_text=True, **given
            )
            assert whole == "def f(" + expected.text


@asynchronous
async def test_tokens_are_the_likeliest_unless_they_are_to_be_drawn() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        greedy = await over_grpc(server, "def f(", max_tokens=8, temperature=0.0)
        for given in ({"seed": 5}, {"temperature": 1.0}, {"top_p": 1.0}, {"do_sample": False}):
            told = await client.text_generation("def f(", max_new_tokens=8, **given)
            assert told == greedy.text, given
        drawn = await over_grpc(server, "def f(", max_tokens=8, seed=5)
        told = await client.text_generation("def f(", max_new_tokens=8, seed=5, do_sample=True)
        assert told == drawn.text != greedy.text


@asynchronous
async def test_details_have_tokens_with_their_probabilities() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        expected = await over_grpc(server, "def f(", max_tokens=6, logprobs=2, **SAMPLED)
        answer = await client.text_generation(
            "def f(", max_new_tokens=6, details=True, top_n_tokens=2, **SAMPLED
        )
        details = answer.details
        assert details is not None and details.top_tokens is not None
        assert answer.generated_text == expected.text
        assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 6, 7)
        assert [(one.id, one.text, one.logprob, one.special) for one in details.tokens] == [
            (one.token_id, one.text, one.logprob, False) for one in expected.logprobs
        ]
        top: list[Any] = details.top_tokens
        assert [[(one["id"], one["logprob"]) for one in place] for place in top] == [
            list(one.top) for one in expected.logprobs
        ]


@asynchronous
async def test_a_text_is_streamed() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        expected = await over_grpc(server, "def f(", max_tokens=12, logprobs=0, **SAMPLED)
        asked: dict[str, Any] = {"max_new_tokens": 12, "stream": True, **SAMPLED}
        texts = [one async for one in await client.text_generation("def f(", **asked)]
        assert "".join(texts) == expected.text and len(texts) == 12
        stream = await client.text_generation("def f(", details=True, **asked)
        *events, last = [one async for one in stream]
        assert [one.index for one in events] == list(range(1, 12))
        assert [one.token.id for one in (*events, last)] == list(expected.token_ids)
        assert [one.token.logprob for one in (*events, last)] == [
            one.logprob for one in expected.logprobs
        ]
        assert all(one.generated_text is one.details is None for one in events)
        assert last.generated_text == expected.text and last.details is not None
        assert last.details.finish_reason == "length"
        assert (last.details.generated_tokens, last.details.seed) == (12, 7)
        assert last.details.input_length == expected.usage.prompt_tokens


@asynchronous
async def test_a_stop_string_ends_the_text_and_is_told() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        whole = await client.text_generation("def f(", max_new_tokens=12)
        stop = whole[4:9]
        expected = whole[: whole.index(stop) + len(stop)]
        answer = await client.text_generation(
            "def f(", max_new_tokens=12, details=True, stop=[stop, "never"]
        )
        assert answer.details is not None
        assert (answer.generated_text, answer.details.finish_reason) == (expected, "stop_sequence")
        stream = await client.text_generation("def f(", stop=[stop], stream=True, details=True)
        events = [one async for one in stream]
        assert "".join(one.token.text for one in events) == expected
        assert events[-1].generated_text == expected


@asynchronous
async def test_the_end_of_a_text_is_a_special_token_without_text() -> None:
    engine = replace(ECHO, options=replace(ECHO.options, never=()))
    asked: dict[str, Any] = {"temperature": 1000.0, "seed": 17, "details": True}  # draws it
    async with echo_server(engine) as server, tgi_client(server) as client:
        answer = await client.text_generation("a", **asked)
        assert answer.details is not None
        assert (answer.details.finish_reason, answer.details.generated_tokens) == ("eos_token", 93)
        *tokens, last = answer.details.tokens
        assert (last.id, last.special) == (EOS, True)
        assert not any(one.special for one in tokens)
        events = [one async for one in await client.text_generation("a", stream=True, **asked)]
        assert (events[-1].token.special, events[-1].token.text) == (True, "")
        assert "".join(one.token.text for one in events) == answer.generated_text


@asynchronous
async def test_what_is_served_is_told() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        info = await client.get_endpoint_info()
        assert (info["model_id"], info["max_total_tokens"]) == ("echo", 1024)
        assert info["model_sha"] == server.handle().manifest.digest
        assert await client.health_check()
        server.server.service.models.set_ready("echo", "running its canaries")
        assert not await client.health_check()


@asynchronous
async def test_one_of_several_engines_is_named_in_the_body() -> None:
    async with echo_server(ECHO, names=("a", "b")) as server:
        body = b'{"inputs": "x", "parameters": {"max_new_tokens": 2}%s}'
        answer = await exchange(server.http_port, post("/generate", body % b', "model": "b"'))
        assert answer.status == 200
        answer = await exchange(server.http_port, post("/generate", body % b""))
        assert answer.status == 404
        assert "several engines are served" in answer.document["error"]


@asynchronous
async def test_a_chat_goes_by_the_openai_api() -> None:
    messages = [{"role": "user", "content": "def f("}]
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        expected = await over_grpc(server, messages, max_tokens=6, seed=7)
        asked: dict[str, Any] = {"model": "echo", "max_tokens": 6, "seed": 7}
        answer = await client.chat_completion(messages, **asked)
        assert answer.choices[0].message.content == expected.text
        stream = await client.chat_completion(messages, stream=True, **asked)
        told = [one.choices[0].delta.content or "" async for one in stream]
        assert "".join(told) == expected.text


@asynchronous
async def test_errors_have_the_clients_own_types() -> None:
    async with echo_server(ECHO) as server, tgi_client(server) as client:
        with pytest.raises(ValidationError, match=r"parameters\.best_of: is not supported"):
            await client.text_generation("a", best_of=2)
        with pytest.raises(ValidationError, match=r"parameters\.temperature: is -1"):
            await client.text_generation("a", temperature=-1.0, stream=True)


@asynchronous
async def test_a_client_that_leaves_ends_its_request() -> None:
    async with echo_server(SLOW) as server, tgi_client(server) as client:
        stream = await client.text_generation("a", stream=True)
        assert isinstance(await anext(aiter(stream)), str)
        await client.close()
        await server.idle()
