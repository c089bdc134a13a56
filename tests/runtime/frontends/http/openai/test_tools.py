"""Answers with calls of tools and thoughts, read by the unmodified `openai` SDK."""

import json
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.support.aio import asynchronous
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import RunningServer, echo_server

SEED = 1
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


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": SCHEMA}}


SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
THINKING: dict[str, Any] = {
    "messages": [*MESSAGES, {"role": "assistant", "content": "<think>\n"}],
    "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
}
"""A prompt that ends within a thought."""


def asking(**fields: Any) -> dict[str, Any]:
    tools = [tool("get_weather"), tool("get_time")]
    return {"model": "echo", "messages": MESSAGES, "max_tokens": 400, "tools": tools, **fields}


NAMED = {"type": "function", "function": {"name": "get_time"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "get_time"}), (NAMED, {"get_time"}), (ALLOWED, {"get_time"})],
    ids=["required", "named", "allowed"],
)
@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "qwen3_coder", "deepseek_v31", "phi", "harmony"]
)
@asynchronous
async def test_a_required_call_has_the_shape_of_its_tool(
    name: str, choice: Any, names: set[str]
) -> None:
    asked = asking(tool_choice=choice, parallel_tool_calls=False, n=4, seed=SEED)
    async with echo_server(replace(ECHO, answer_format=name)) as server, sdk(server) as client:
        answer = await client.chat.completions.create(**asked)
        for one in answer.choices:
            assert one.finish_reason == "tool_calls"
            calls: list[Any] = one.message.tool_calls or []
            (call,) = calls
            assert call.function.name in names
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@asynchronous
async def test_a_strict_tool_is_called_well_or_not_at_all() -> None:
    asked = saying(CALL, tools=[tool("get_weather", strict=True)])
    async with echo_server(HERMES) as server, sdk(server) as client:
        with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.choice"):
            await client.chat.completions.create(**asked)
        begun = "<tool_call>\n"
        asked = asking(
            tools=[tool("get_weather", strict=True)],
            messages=[*MESSAGES, {"role": "assistant", "content": begun}],
            response_format={"type": "json_object"},
            seed=SEED,
        )
        (choice,) = (await client.chat.completions.create(**asked)).choices
        assert choice.finish_reason in ("stop", "tool_calls")
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)


@asynchronous
async def test_a_schema_that_cannot_be_held_binds_strict_tools_only() -> None:
    one = tool("f", strict=True)
    one["function"]["parameters"] = {"type": "object", "not": {"required": ["a"]}}
    async with echo_server(HERMES) as server, sdk(server) as client:
        with pytest.raises(openai.BadRequestError, match=r"tools.*not"):
            await client.chat.completions.create(**asking(tools=[one], tool_choice="required"))
        one["function"]["strict"] = False
        answer = await client.chat.completions.create(
            **asking(tools=[one], tool_choice="required", max_tokens=8)
        )
        assert answer.choices


@asynchronous
async def test_a_thought_keeps_its_budget() -> None:
    asked: dict[str, Any] = {"model": "echo", "max_tokens": 60, **THINKING}
    for budget in (0, 7):
        body = {**THINKING["extra_body"], "thinking_token_budget": budget}
        async with echo_server(HERMES) as server, sdk(server) as client:
            answer = await client.chat.completions.create(**{**asked, "extra_body": body})
            (choice,) = answer.choices
            assert choice.message.content
            assert "</think>" not in choice.message.content
            usage = answer.usage
            assert usage is not None and usage.completion_tokens_details is not None
            thought = usage.completion_tokens_details.reasoning_tokens or 0
            end = len(await tokens_of(server, "</think>"))
            assert thought <= budget + end
            assert bool((choice.message.model_extra or {}).get("reasoning")) == bool(budget)


async def tokens_of(server: RunningServer, text: str) -> list[int]:
    url = f"http://127.0.0.1:{server.http_port}/tokenize"
    async with httpx.AsyncClient() as client:
        body = {"prompt": text, "add_special_tokens": False}
        return list((await client.post(url, json=body)).json()["tokens"])


@asynchronous
async def test_a_shape_begins_after_the_thought() -> None:
    body = {**THINKING["extra_body"], "thinking_token_budget": 9}
    asked: dict[str, Any] = {
        **THINKING,
        "model": "echo",
        "max_tokens": 500,
        "seed": SEED,
        "extra_body": body,
    }
    formed: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    async with echo_server(HERMES) as server, sdk(server) as client:
        answer = await client.chat.completions.create(**asked, response_format=formed)
        (choice,) = answer.choices
        assert (choice.message.model_extra or {})["reasoning"]
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        asked |= {"tools": [tool("get_time")], "parallel_tool_calls": False}
        answer = await client.chat.completions.create(**asked, tool_choice="required")
        (choice,) = answer.choices
        assert (choice.message.model_extra or {})["reasoning"]
        called: list[Any] = choice.message.tool_calls or []
        assert [one.function.name for one in called] == ["get_time"]


@asynchronous
async def test_a_notation_that_is_no_json_is_held_to_types_and_enums() -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": ["integer", "null"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    one = tool("f", strict=True)
    one["function"]["parameters"] = schema
    asked = asking(tools=[one], tool_choice="required", parallel_tool_calls=False, n=4, seed=SEED)
    async with echo_server(replace(ECHO, answer_format="gemma")) as server, sdk(server) as client:
        answer = await client.chat.completions.create(**asked)
        for choice in answer.choices:
            calls: list[Any] = choice.message.tool_calls or []
            (call,) = calls
            jsonschema.validate(json.loads(call.function.arguments), schema)
        with pytest.raises(openai.BadRequestError, match="tools: has 'minimum' in the schema of g"):
            await client.chat.completions.create(**asking(tools=[tool("g", strict=True)]))
        loose = asking(tools=[tool("g")], tool_choice="required", max_tokens=8)
        assert (await client.chat.completions.create(**loose)).choices
