"""What the unmodified `anthropic` SDK asks and reads, against the engine in this process."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import anthropic
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.http1 import exchange, post
from tests.support.openai_sdk import ECHO, SLOW
from tests.support.servers import CONFIG, TOKENIZER, echo_server
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.completion import Result
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.text.tokenizer import Tokenizer

USER: Any = {"role": "user", "content": [{"type": "text", "text": "def f("}]}
SAMPLED: Mapping[str, Any] = {"seed": 7, "temperature": 0.9, "top_p": 0.8}
ASKED: Mapping[str, Any] = {
    "model": "echo",
    "system": "Be brief.",
    "messages": [USER],
    "max_tokens": 12,
    "extra_body": SAMPLED,
}


async def over_grpc(address: str, *messages: Mapping[str, Any], **asked: Any) -> Result:
    """The same over trtc.v1: the oracle."""
    async with AsyncClient(address) as client:
        generation = client.chat(list(messages), **{"max_tokens": 12, **SAMPLED, **asked})
        return await generation.result()


SYSTEM = {"role": "system", "content": "Be brief."}


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


@asynchronous
async def test_a_message_is_answered_whole() -> None:
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        expected = await over_grpc(server.address, SYSTEM, USER)
        message = await client.messages.create(**ASKED)
        assert text_of(message) == expected.text
        assert (message.type, message.role, message.model) == ("message", "assistant", "echo")
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        assert message.id.startswith("msg_")
        assert message._request_id == message.id.replace("msg_", "req_")
        usage = message.usage
        assert (usage.input_tokens, usage.output_tokens) == (expected.usage.prompt_tokens, 12)
        assert usage.cache_read_input_tokens == usage.cache_creation_input_tokens == 0
        again = await client.messages.create(**ASKED)
        assert text_of(again) == text_of(message) and again.id != message.id
        assert again.usage.cache_read_input_tokens == 16, "a page"
        assert again.usage.input_tokens == expected.usage.prompt_tokens - 16


@asynchronous
async def test_a_message_is_streamed() -> None:
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        expected = await over_grpc(server.address, SYSTEM, USER)
        await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            message = await stream.get_final_message()
        assert text == text_of(message) == expected.text
        assert message.stop_reason == "max_tokens"
        usage = message.usage
        assert (usage.cache_read_input_tokens, usage.output_tokens) == (16, 12)
        assert usage.input_tokens == expected.usage.prompt_tokens - 16


@asynchronous
async def test_events_come_in_the_order_of_the_api() -> None:
    body = {**ASKED, **SAMPLED, "stream": True}
    del body["extra_body"]
    async with echo_server(ECHO) as server:
        expected = await over_grpc(server.address, SYSTEM, USER)
        request = post("/v1/messages", json.dumps(body).encode())
        answer = await exchange(server.http_port, request)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [one.split("\n") for one in answer.body.decode().split("\n\n") if one]
        names = [name.removeprefix("event: ") for name, _ in events]
        told = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert names == [one["type"] for one in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = told[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == expected.usage.prompt_tokens
    assert "req_" + start["id"].removeprefix("msg_") == answer.headers["request-id"]
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 12


@asynchronous
async def test_stop_sequences_and_tokens_end_a_message() -> None:
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        expected = await over_grpc(server.address, SYSTEM, USER)
        word = expected.text.split()[-1]
        asked = {**ASKED, "stop_sequences": ["never said", word]}
        message = await client.messages.create(**asked)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
        assert text_of(message) == expected.text[: expected.text.index(word)]
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert (text_of(final), final.stop_sequence) == (text_of(message), word)
        extra = {**SAMPLED, "stop_token_ids": [expected.token_ids[3]]}
        ended = await client.messages.create(**{**ASKED, "extra_body": extra})
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
        assert ended.usage.output_tokens == 4


@asynchronous
async def test_tokens_are_counted() -> None:
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        expected = await over_grpc(server.address, SYSTEM, USER, max_tokens=1)
        counted = await client.messages.count_tokens(
            model="echo", system="Be brief.", messages=[USER]
        )
        assert counted.input_tokens == expected.usage.prompt_tokens
        assert counted._request_id


@asynchronous
async def test_conversations_are_read_in_all_their_forms() -> None:
    """Each gives the answer to the same conversation over trtc.v1."""
    turns: list[tuple[Any, list[Any], list[Any]]] = [
        # (system, messages, messages of trtc.v1)
        (
            [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            [USER],
            [SYSTEM, USER],
        ),
        ("", [SYSTEM, USER], [SYSTEM, USER]),
        (
            "",
            [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
            [{"role": "user", "content": [{"type": "text", "text": one} for one in "ab"]}],
        ),
        ("Be brief.", [USER, {"role": "assistant", "content": ""}], [SYSTEM, USER]),
    ]
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        for system, messages, same in turns:
            expected = await over_grpc(server.address, *same)
            answer = await client.messages.create(
                **{**ASKED, "system": system, "messages": messages}
            )
            assert text_of(answer) == expected.text, same


@asynchronous
async def test_what_the_assistant_has_begun_to_say_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "self, x"}]
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        expected = await over_grpc(server.address, SYSTEM, *messages, continue_final_message=True)
        answer = await client.messages.create(**{**ASKED, "messages": messages})
        assert text_of(answer) == expected.text


@asynchronous
async def test_answers_go_back_as_messages() -> None:
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        first = await client.messages.create(**ASKED)
        go_on = {"role": "user", "content": "Go on."}
        for said in (first.to_param(), {"role": "assistant", "content": first.content}):
            second = await client.messages.create(**{**ASKED, "messages": [USER, said, go_on]})
            assert second.usage.output_tokens == 12


@asynchronous
async def test_what_is_ignored_is_named_in_a_header() -> None:
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        raw = await client.messages.with_raw_response.create(
            **{**ASKED, "metadata": {"user_id": "somebody"}, "service_tier": "auto"},
            tools=[],
            thinking={"type": "disabled"},
            extra_headers={"anthropic-beta": "something-2026-01-01"},
        )
        named = set(raw.headers["x-trtc-ignored"].split(", "))
        assert named == {"metadata", "service_tier", "anthropic-beta"}
        assert raw.headers["request-id"].startswith("req_")


@asynchronous
async def test_token_ids_are_told_by_vllms_field() -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    async with echo_server(ECHO) as server, anthropic_sdk(server) as client:
        extra = {"return_token_ids": True, "temperature": 0, "logit_bias": {"321": 100}}
        message = await client.messages.create(**{**ASKED, "extra_body": extra})
        assert message.model_dump()["token_ids"] == [321] * 12
        assert text_of(message) == tokenizer.decode((321,) * 12)
        assert "token_ids" not in (await client.messages.create(**ASKED)).model_dump()
    tokenizer.close()


@asynchronous
async def test_errors_are_those_of_the_sdk() -> None:
    async with echo_server(ECHO, names=("a", "b")) as server, anthropic_sdk(server) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**ASKED)
        assert unknown.value.type == "not_found_error"
        assert unknown.value.request_id is not None
        assert isinstance(unknown.value.body, dict)
        assert unknown.value.body["request_id"] == unknown.value.request_id
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.count_tokens(
                model="a", messages=[USER], output_config={"effort": cast(Any, "most")}
            )
        assert refused.value.type == "invalid_request_error"
        assert "output_config.effort: is 'most'" in refused.value.message
        server.server.service.models.set_ready("a", "running its canaries")
        with pytest.raises(anthropic.InternalServerError) as unready:
            await client.messages.create(**{**ASKED, "model": "a"})
        assert (unready.value.status_code, unready.value.type) == (503, "overloaded_error")
        assert "running its canaries" in unready.value.message


@asynchronous
async def test_the_sdk_asks_a_full_server_again() -> None:
    """As it says: after `retry-after`."""
    config = replace(CONFIG, limits=ServiceLimits(max_streams=1))
    async with (
        echo_server(SLOW, config=config) as server,
        anthropic_sdk(server) as once,
        anthropic_sdk(server, max_retries=2) as patient,
    ):
        stream = await once.messages.create(**{**ASKED, "max_tokens": 900}, stream=True)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await once.messages.create(**ASKED)
        assert caught.value.type == "rate_limit_error"
        assert caught.value.response.headers["retry-after"] == "1"
        asking = asyncio.create_task(patient.messages.create(**{**ASKED, "max_tokens": 2}))
        await eventually(lambda: server.num_refused() >= 2, "it is refused, too")
        await stream.close()
        assert (await asking).usage.output_tokens == 2
        await server.idle()


@asynchronous
async def test_a_client_that_closes_its_stream_ends_its_request() -> None:
    async with echo_server(SLOW) as server, anthropic_sdk(server) as client:
        stream = await client.messages.create(**{**ASKED, "max_tokens": 900}, stream=True)
        await eventually(lambda: server.handle().loop.stats().running == 1, "it runs")
        await stream.close()
        await server.idle(timeout=5)


@asynchronous
async def test_a_client_that_gives_up_on_a_whole_answer_ends_its_request() -> None:
    async with echo_server(SLOW) as server, anthropic_sdk(server) as client:
        asking = asyncio.create_task(client.messages.create(**{**ASKED, "max_tokens": 900}))
        await eventually(lambda: server.handle().loop.stats().running == 1, "it runs")
        asking.cancel()
        await server.idle(timeout=5)
        with pytest.raises(asyncio.CancelledError):
            await asking


@asynchronous
async def test_an_error_in_a_stream_is_raised_by_the_sdk() -> None:
    async with echo_server(SLOW) as server, anthropic_sdk(server) as client:
        stream = await client.messages.create(**{**ASKED, "max_tokens": 900}, stream=True)
        await eventually(lambda: server.handle().loop.stats().running == 1, "it runs")
        await asyncio.to_thread(server.handle().loop.stop)
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for _ in stream:
                pass
        assert caught.value.type in ("overloaded_error", "api_error")
        assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "error"
