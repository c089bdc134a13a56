"""Responses, as the unmodified `openai` SDK asks for them and reads their events."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.aio import asynchronous
from tests.support.http1 import exchange, post
from tests.support.openai_sdk import ECHO, SLOW, sdk
from tests.support.servers import RunningServer, echo_server
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.completion import Result

PATH = "/v1/responses"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "def f("},
]
ASKED: Mapping[str, Any] = {
    "model": "echo",
    "instructions": "Be brief.",
    "input": "def f(",
    "temperature": 0.9,
    "extra_body": {"seed": 7},
}
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]
# Of ResponseResource in the Open Responses specification: all are required.
REQUIRED = """
    id object created_at completed_at status incomplete_details model previous_response_id
    instructions output error tools tool_choice truncation parallel_tool_calls text top_p
    presence_penalty frequency_penalty top_logprobs temperature reasoning usage max_output_tokens
    max_tool_calls store background service_tier metadata safety_identifier prompt_cache_key
"""


async def over_grpc(server: RunningServer, **asked: Any) -> Result:
    async with AsyncClient(server.address) as client:
        asked = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0.9, "seed": 7, **asked}
        return await client.chat(asked.pop("messages"), **asked).result()


@asynchronous
async def test_a_response_is_answered_whole() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server)
        raw = await client.responses.with_raw_response.create(**ASKED, max_output_tokens=9)
        response = raw.parse()
        assert response.output_text == expected.text
        assert (response.status, response.error) == ("incomplete", None)
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert response.usage.output_tokens == 9
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        assert response.usage.output_tokens_details.reasoning_tokens == 0
        assert (response.instructions, response.temperature) == ("Be brief.", 0.9)
        assert set(REQUIRED.split()) <= raw.http_response.json().keys()


@asynchronous
async def test_a_response_that_ends_by_itself_is_completed() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        whole = await client.responses.create(**ASKED, max_output_tokens=9)
        stop = whole.output_text[4:8]
        assert stop
        asked = {**ASKED, "extra_body": {"seed": 7, "stop": [stop]}}
        response = await client.responses.create(**asked, max_output_tokens=900)
        assert (response.status, response.incomplete_details) == ("completed", None)
        assert response.output_text == whole.output_text[: whole.output_text.index(stop)]
        assert response.completed_at is not None


@asynchronous
async def test_events_come_in_order_and_add_up() -> None:
    async with echo_server(SLOW) as server, sdk(server) as client:
        expected = await over_grpc(server)
        stream = await client.responses.create(**ASKED, max_output_tokens=9, stream=True)
        events: list[Any] = [event async for event in stream]
        kinds = [event.type for event in events]
        assert [kind for at, kind in enumerate(kinds) if kind not in kinds[:at]] == EVENTS
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert len(deltas) > 1 and "".join(deltas) == expected.text
        last: Response = events[-1].response
        assert last.output_text == expected.text
        assert last.output[0].id == events[2].item.id
        assert events[0].response.output == [] and events[0].response.status == "in_progress"


@asynchronous
async def test_the_sdks_own_reader_of_streams_agrees() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server)
        stop = expected.text[4:8]
        asked: Any = {**ASKED, "extra_body": {"seed": 7, "stop": stop}}
        async with client.responses.stream(**asked) as stream:
            text = ""
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
            final = await stream.get_final_response()
        assert final.output_text == text == expected.text[: expected.text.index(stop)]


@asynchronous
async def test_answers_go_back_as_items() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        first = await client.responses.create(**ASKED, max_output_tokens=9)
        items: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "def f("}]},
            *(one.model_dump() for one in first.output),
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
            {"type": "message", "role": "user", "content": "Go on."},
        ]
        second = await client.responses.create(
            model="echo", input=items, temperature=0, max_output_tokens=5
        )
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        messages = [
            MESSAGES[1],
            {"role": "assistant", "content": first.output_text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
            {"role": "user", "content": "Go on."},
        ]
        expected = await over_grpc(server, messages=messages, temperature=0.0, max_tokens=5)
        assert second.output_text == expected.text


@asynchronous
async def test_log_probabilities_are_included_where_they_are_asked_for() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server, logprobs=2)
        response = await client.responses.create(
            **ASKED,
            max_output_tokens=9,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        told: Any = response.output[0]
        logprobs = told.content[0].logprobs
        assert [one.logprob for one in logprobs] == pytest.approx(
            [one.logprob for one in expected.logprobs], abs=1e-6
        )
        assert all(len(one.top_logprobs) == 2 for one in logprobs)


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "is missing"),
    ({"input": 5}, "input", "got int"),
    ({"input": []}, "input", "has no messages"),
    ({"input": ["a"]}, "input[0]", "is a str"),
    ({"input": [{"type": "image_generation_call"}]}, "input[0].type", "is not supported"),
    ({"input": [{"type": ["message"]}]}, "input[0].type", "is not supported"),
    ({"input": [{"content": "a"}]}, "input[0].role", "is missing"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "'king'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_image' is not supported",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content[0].text",
        "is a int",
    ),
    ({"input": "a", "instructions": 5}, "instructions", "got int"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "is 0"),
    ({"input": "a", "max_output_tokens": 9999}, "max_output_tokens", "maximum context length"),
    ({"input": "x " * 3000}, "input", "maximum context length"),
    ({"input": "a", "top_p": 2}, "top_p", "is 2"),
    ({"input": "a", "store": True}, "store", "is not supported"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    ({"input": "a", "background": True}, "background", "is not supported"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
    ({"input": "a", "tools": [TOOL]}, "tools", "is not supported"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "is given without tools"),
    (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        "names 'g'",
    ),
    ({"input": "a", "tool_choice": {"type": "file_search"}}, "tool_choice", "has no type"),
    ({"input": "a", "parallel_tool_calls": 1}, "parallel_tool_calls", "got int"),
    ({"input": "a", "max_tool_calls": 1}, "max_tool_calls", "is not supported"),
    ({"input": "a", "reasoning": {"effort": "most"}}, "reasoning.effort", "is 'most'"),
    ({"input": "a", "reasoning": "high"}, "reasoning", "got str"),
    ({"input": [{"type": "function_call"}]}, "input[0].name", "is a NoneType"),
    ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments", "is a dict"),
    ({"input": ["a", {**CALLED, "arguments": "{"}]}, "input[0]", "is a str"),
    ({"input": [CALLED, {**CALLED, "arguments": "{"}]}, "input[1].arguments", "is not JSON"),
    ({"input": [CALLED] * 300}, "input", "has 257 calls of one turn"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content", "is a int"),
    ({"input": [{"type": "reasoning", "summary": [5]}]}, "input[0].summary[0].text", "NoneType"),
    ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format.type", "is 'grammar'"),
    ({"input": "a", "metadata": {"a": 5}}, "metadata", "got int"),
]


@asynchronous
async def test_every_bad_field_is_named() -> None:
    async with echo_server(ECHO) as server:
        for document, param, said in BAD:
            body = json.dumps(document).encode()
            answer = await exchange(server.http_port, post(PATH, body))
            what = (str(document)[:200], answer.body[:300])
            assert answer.status == 400, what
            assert answer.error["param"] == param, what
            assert said in answer.error["message"], what
        await server.idle()


@asynchronous
async def test_a_client_that_closes_its_stream_ends_its_request() -> None:
    async with echo_server(SLOW) as server, sdk(server) as client:
        stream = await client.responses.create(**ASKED, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await server.idle(timeout=5)


@asynchronous
async def test_a_response_that_fails_says_why() -> None:
    async with echo_server(SLOW) as server, sdk(server) as client:
        stream = await client.responses.create(**ASKED, stream=True)
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                await asyncio.to_thread(server.handle().loop.stop)
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.message
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(events[-1].response.id)
