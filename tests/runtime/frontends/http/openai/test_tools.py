"""Answers with calls of tools and thoughts, read by the unmodified `openai` SDK."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.support.aio import asynchronous
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import echo_server

HERMES = replace(ECHO, answer_format="hermes")
MESSAGES: list[Any] = [{"role": "user", "content": "def f("}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nIt rains.\n</think>\n\n"


def saying(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is a text, whatever the model."""
    return {
        "model": "echo",
        "messages": MESSAGES,
        "max_tokens": 400,
        "extra_body": {"structured_outputs": {"choice": [text]}},
        **fields,
    }


@asynchronous
async def test_a_whole_answer_has_thought_text_and_calls() -> None:
    asked = saying(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}", tools=TOOLS)
    async with echo_server(HERMES) as server, sdk(server) as client:
        answer = await client.chat.completions.create(**asked)
        (choice,) = answer.choices
        extra = choice.message.model_extra or {}
        assert extra["reasoning"] == extra["reasoning_content"] == "It rains."
        assert choice.message.content == "Let me see."
        assert choice.finish_reason == "tool_calls"
        calls: list[Any] = choice.message.tool_calls or []
        assert [one.function.name for one in calls] == ["get_weather"] * 2
        assert [json.loads(one.function.arguments) for one in calls] == [{"city": "Paris"}] * 2
        assert len({one.id for one in calls}) == 2
        assert all(one.id.startswith("call_") for one in calls)
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        thought = answer.usage.completion_tokens_details.reasoning_tokens or 0
        assert 0 < thought < answer.usage.completion_tokens


@asynchronous
async def test_a_stream_says_what_the_whole_answer_does() -> None:
    asked = saying(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}", tools=TOOLS)
    async with echo_server(HERMES) as server, sdk(server) as client:
        async with client.chat.completions.stream(**asked) as stream:
            deltas = [
                event.chunk.choices[0].delta async for event in stream if event.type == "chunk"
            ]
            answer = await stream.get_final_completion()
        extras = [one.model_extra or {} for one in deltas]
        assert "".join(one.get("reasoning") or "" for one in extras) == "It rains."
        assert "".join(one.get("reasoning_content") or "" for one in extras) == "It rains."
        (choice,) = answer.choices
        assert choice.message.content == "Let me see."
        assert choice.finish_reason == "tool_calls"
        calls: list[Any] = choice.message.tool_calls or []
        assert [one.index for one in calls] == [0, 1]
        assert [json.loads(one.function.arguments) for one in calls] == [{"city": "Paris"}] * 2


@asynchronous
async def test_a_call_alone_has_no_content() -> None:
    async with echo_server(HERMES) as server, sdk(server) as client:
        answer = await client.chat.completions.create(**saying(CALL, tools=TOOLS))
        assert answer.choices[0].message.content is None


@asynchronous
async def test_without_tools_a_call_is_text() -> None:
    async with echo_server(HERMES) as server, sdk(server) as client:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await client.chat.completions.create(**saying(CALL, **fields))
            (choice,) = answer.choices
            assert choice.message.content == CALL
            assert choice.message.tool_calls is None
            assert choice.finish_reason == "stop"


@asynchronous
async def test_a_cut_call_is_text_and_ends_by_length() -> None:
    asked = saying(CALL, tools=TOOLS, max_tokens=8)
    async with echo_server(HERMES) as server, sdk(server) as client:
        (choice,) = (await client.chat.completions.create(**asked)).choices
        assert choice.finish_reason == "length"
        assert choice.message.content and CALL.startswith(choice.message.content)


@asynchronous
async def test_a_model_that_calls_nothing_takes_no_tools() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        with pytest.raises(openai.BadRequestError, match=r"tools.*--format"):
            await client.chat.completions.create(**saying("x", tools=TOOLS))
