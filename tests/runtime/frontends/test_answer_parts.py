"""Text, thoughts and calls of one answer by every way in, whole and streamed: the same everywhere.

Ids of calls are drawn anew for each answer, and differ.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.aio import asynchronous
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.ollama_client import ollama_client
from tests.support.openai_sdk import sdk
from tests.support.scripted import CITIES, LOOKING, THOUGHT, chat_tokenizer, scripted_server
from tests.support.servers import RunningServer
from trtc.runtime.client import AsyncClient
from trtc.runtime.text.answer import AnswerPart, joined

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Of a city", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL: Any = {"type": "function", **FUNCTION}


class Said(NamedTuple):
    """An answer."""

    text: str
    thought: str
    calls: tuple[tuple[str, str], ...]
    """Name and city of each."""
    ended_by: str
    num_ids: int
    """Different ids of calls."""


EXPECTED = Said(
    LOOKING, THOUGHT, tuple(("get_weather", city) for city in CITIES), "calls", len(CITIES)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def _server(tokenizer: Path) -> AsyncIterator[RunningServer]:
    async with scripted_server(tokenizer) as server:
        yield server
        await server.idle()


def _said(
    text: str, thought: str, calls: Iterable[tuple[str, str, Any]], ended_by: str | None, by: str
) -> Said:
    """Args: calls: id, name and arguments, an object or its text; by: what ends by calls."""
    listed = list(calls)
    read = [
        (name, given if isinstance(given, dict) else json.loads(given)) for _, name, given in listed
    ]
    return Said(
        text,
        thought,
        tuple((name, arguments["city"]) for name, arguments in read),
        "calls" if ended_by == by else str(ended_by),
        len({number for number, _, _ in listed}),
    )


def _of_parts(parts: Iterable[AnswerPart], reason: str) -> Said:
    parts = list(parts)
    return _said(
        "".join(one.text for one in parts if one.kind == "text"),
        "".join(one.text for one in parts if one.kind == "reasoning"),
        [(one.id, one.name, one.text) for one in parts if one.kind == "call"],
        reason,
        "stop",  # it has no other word
    )


async def trtc_v1(server: RunningServer) -> Said:
    async with AsyncClient(server.address) as client:
        result = await client.chat(
            MESSAGES, tools=[TOOL], splits_answer=True, temperature=0.0, max_tokens=300
        ).result()
    assert result.text == LOOKING
    assert 0 < result.usage.reasoning_tokens < result.usage.completion_tokens
    document = result.as_json()
    assert document["reasoning"] == THOUGHT
    assert [json.loads(one["arguments"])["city"] for one in document["tool_calls"]] == list(CITIES)
    return _of_parts(result.parts, result.finish_reason.value)


async def trtc_v1_streamed(server: RunningServer) -> Said:
    async with AsyncClient(server.address) as client:
        generation = client.chat(
            MESSAGES, tools=[TOOL], splits_answer=True, temperature=0.0, max_tokens=300
        )
        outputs = [one async for one in generation]
    parts = [part for one in outputs for part in one.parts]
    assert len(parts) > len(joined(parts)), "it comes in pieces"
    reason = outputs[-1].finish_reason
    assert reason is not None
    return _of_parts(joined(parts), reason.value)


ASKED: dict[str, Any] = {"model": "echo", "temperature": 0}


async def openai_chat(server: RunningServer) -> Said:
    async with sdk(server) as client:
        answer = await client.chat.completions.create(
            **ASKED, messages=MESSAGES, tools=[TOOL], max_tokens=300
        )
    return _of_chat(answer)


async def openai_chat_streamed(server: RunningServer) -> Said:
    async with (
        sdk(server) as client,
        client.chat.completions.stream(
            **ASKED, messages=MESSAGES, tools=[TOOL], max_tokens=300
        ) as stream,
    ):
        return _of_chat(await stream.get_final_completion())


def _of_chat(answer: Any) -> Said:
    (choice,) = answer.choices
    message = choice.message
    assert message.reasoning == message.reasoning_content
    calls = [(one.id, one.function.name, one.function.arguments) for one in message.tool_calls]
    return _said(message.content, message.reasoning, calls, choice.finish_reason, "tool_calls")


async def responses(server: RunningServer) -> Said:
    async with sdk(server) as client:
        response = await client.responses.create(
            **ASKED, input=MESSAGES, tools=[RESPONSES_TOOL], max_output_tokens=300
        )
    return _of_response(response)


async def responses_streamed(server: RunningServer) -> Said:
    async with (
        sdk(server) as client,
        client.responses.stream(
            **ASKED, input=MESSAGES, tools=[RESPONSES_TOOL], max_output_tokens=300
        ) as stream,
    ):
        return _of_response(await stream.get_final_response())


def _of_response(response: Any) -> Said:
    assert [one.type for one in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    thought, _, *calls = response.output
    return _said(
        response.output_text,
        thought.content[0].text,
        [(one.call_id, one.name, one.arguments) for one in calls],
        response.status,
        "completed",
    )


async def anthropic(server: RunningServer) -> Said:
    async with anthropic_sdk(server) as client:
        return _of_message(await client.messages.create(**_message()))


async def anthropic_streamed(server: RunningServer) -> Said:
    async with (
        anthropic_sdk(server) as client,
        client.messages.stream(**_message()) as stream,
    ):
        return _of_message(await stream.get_final_message())


def _message() -> dict[str, Any]:
    tool = {"name": "get_weather", "description": "Of a city", "input_schema": SCHEMA}
    return {
        "model": "echo",
        "messages": MESSAGES,
        "tools": [tool],
        "max_tokens": 300,
        "extra_body": {"temperature": 0},
    }


def _of_message(message: Any) -> Said:
    kinds = [one.type for one in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, *calls = message.content
    return _said(
        text.text,
        thought.thinking,
        [(one.id, one.name, one.input) for one in calls],
        message.stop_reason,
        "tool_use",
    )


async def ollama(server: RunningServer) -> Said:
    async with ollama_client(server) as client:
        answer = await client.chat("echo", MESSAGES, tools=[TOOL], options={"temperature": 0})
    return _of_ollama([answer])


async def ollama_streamed(server: RunningServer) -> Said:
    async with ollama_client(server) as client:
        stream = await client.chat(
            "echo", MESSAGES, tools=[TOOL], options={"temperature": 0}, stream=True
        )
        return _of_ollama([one async for one in stream])


def _of_ollama(answers: list[Any]) -> Said:
    messages = [one.message for one in answers]
    calls = [call.function for one in messages for call in one.tool_calls or ()]
    return _said(
        "".join(one.content or "" for one in messages),
        "".join(one.thinking or "" for one in messages),
        [(str(at), one.name, dict(one.arguments)) for at, one in enumerate(calls)],
        answers[-1].done_reason,
        "stop",
    )


WAYS: dict[str, Callable[[RunningServer], Awaitable[Said]]] = {
    one.__name__: one
    for one in (
        trtc_v1,
        trtc_v1_streamed,
        openai_chat,
        openai_chat_streamed,
        responses,
        responses_streamed,
        anthropic,
        anthropic_streamed,
        ollama,
        ollama_streamed,
    )
}


@pytest.mark.parametrize("way", WAYS)
@asynchronous
async def test_an_answer_has_the_same_parts(way: str, tokenizer: Path) -> None:
    async with _server(tokenizer) as server:
        assert await WAYS[way](server) == EXPECTED


class Delta(NamedTuple):
    """A piece of a call in a stream."""

    number: int
    arguments: str
    id: str = ""
    name: str = ""


async def _trtc_v1_deltas(server: RunningServer) -> list[Delta]:
    async with AsyncClient(server.address) as client:
        generation = client.chat(
            MESSAGES, tools=[TOOL], splits_answer=True, temperature=0.0, max_tokens=300
        )
        parts = [part async for output in generation for part in output.parts]
    return [Delta(one.index, one.text, one.id, one.name) for one in parts if one.kind == "call"]


async def _chat_deltas(server: RunningServer) -> list[Delta]:
    async with sdk(server) as client:
        stream = await client.chat.completions.create(
            **ASKED, messages=MESSAGES, tools=[TOOL], max_tokens=300, stream=True
        )
        chunks = [one async for one in stream]
    calls = [call for one in chunks for call in one.choices[0].delta.tool_calls or ()]
    assert [one.type for one in calls] == ["function" if one.id else None for one in calls]
    return [
        Delta(one.index, one.function.arguments, one.id or "", one.function.name or "")
        for one in calls
    ]


async def _response_deltas(server: RunningServer) -> list[Delta]:
    async with sdk(server) as client:
        stream = await client.responses.create(
            **ASKED, input=MESSAGES, tools=[RESPONSES_TOOL], max_output_tokens=300, stream=True
        )
        events = [one async for one in stream]
    found: list[Delta] = []
    for one in events:
        if one.type == "response.output_item.added" and one.item.type == "function_call":
            assert one.item.arguments == ""
            found.append(Delta(one.output_index - 2, "", one.item.call_id, one.item.name))
        if one.type == "response.function_call_arguments.delta":
            found.append(Delta(one.output_index - 2, one.delta))
    return found


async def _message_deltas(server: RunningServer) -> list[Delta]:
    async with anthropic_sdk(server) as client:
        stream = await client.messages.create(**_message(), stream=True)
        events = [one async for one in stream]
    found: list[Delta] = []
    for one in events:
        if one.type == "content_block_start" and one.content_block.type == "tool_use":
            block = one.content_block
            found.append(Delta(one.index - 2, "", block.id, block.name))
        if one.type == "content_block_delta" and one.delta.type == "input_json_delta":
            found.append(Delta(one.index - 2, one.delta.partial_json))
    return found


@pytest.mark.parametrize(
    "deltas", [_trtc_v1_deltas, _chat_deltas, _response_deltas, _message_deltas]
)
@asynchronous
async def test_arguments_come_while_they_are_written(
    deltas: Callable[[RunningServer], Awaitable[list[Delta]]], tokenizer: Path
) -> None:
    async with _server(tokenizer) as server:
        found = await deltas(server)
    for at, city in enumerate(CITIES):
        first, *rest = (one for one in found if one.number == at)
        assert first.id
        assert first.name == "get_weather"
        assert len(rest) > 2
        assert not any(one.id or one.name for one in rest)
        assert json.loads("".join(one.arguments for one in (first, *rest))) == {"city": city}
    assert [one.number for one in found] == sorted(one.number for one in found)


@asynchronous
async def test_answers_that_are_not_split_are_text(tokenizer: Path) -> None:
    async with _server(tokenizer) as server, AsyncClient(server.address) as client:
        result = await client.chat(MESSAGES, tools=[TOOL], temperature=0.0, max_tokens=300).result()
    assert result.text.startswith(f"<think>\n{THOUGHT}\n</think>")
    assert result.text.endswith("</tool_call>")
    assert result.parts == ()
