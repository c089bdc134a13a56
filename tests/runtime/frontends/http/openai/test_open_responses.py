"""The cases of Open Responses' compliance suite, asked as its tester asks them.

https://www.openresponses.org/compliance: every field that its schemas require, in answers and in
events. Those of images are refused by name.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import asynchronous
from tests.support.http1 import Answer, exchange, post
from tests.support.openai_sdk import ECHO
from tests.support.scripted import chat_tokenizer, scripted_server
from tests.support.servers import RunningServer, echo_server

ENDING = replace(ECHO, options=replace(ECHO.options, never=()), eos=tuple(range(404, 800)))
"""Ends by itself, after some ten tokens."""
GREEDY = {"temperature": 0}
"""So that the first token is never the last."""


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CASES: dict[str, list[dict[str, Any]]] = {
    "basic-response": [message("user", "Greet me in three words.")],
    "system-prompt": [message("system", "Speak as a pirate."), message("user", "Greet me.")],
    "multi-turn": [
        message("user", "I am Alice."),
        message("assistant", "Hello, Alice."),
        message("user", "Who am I?"),
    ],
}
RESPONSE = """
    id object created_at completed_at status incomplete_details model previous_response_id
    instructions output error tools tool_choice truncation parallel_tool_calls text top_p
    presence_penalty frequency_penalty top_logprobs temperature reasoning user usage
    max_output_tokens max_tool_calls store background service_tier metadata safety_identifier
    prompt_cache_key
"""
_WHOLE = "type sequence_number response"
_ITEM = "type sequence_number output_index item"
_PART = "type sequence_number item_id output_index content_index"
_ARGUMENTS = "type sequence_number item_id output_index"
EVENTS = {
    "response.created": _WHOLE,
    "response.in_progress": _WHOLE,
    "response.output_item.added": _ITEM,
    "response.content_part.added": f"{_PART} part",
    "response.output_text.delta": f"{_PART} delta logprobs",
    "response.output_text.done": f"{_PART} text logprobs",
    "response.content_part.done": f"{_PART} part",
    "response.output_item.done": _ITEM,
    "response.completed": _WHOLE,
}


async def ask(server: RunningServer, **fields: Any) -> Answer:
    body = json.dumps({"model": "echo", **GREEDY, **fields}).encode()
    return await exchange(
        server.http_port, post("/v1/responses", body, "Authorization: Bearer none")
    )


def check_response(response: dict[str, Any], status: str) -> None:
    assert set(RESPONSE.split()) <= response.keys()
    assert (response["object"], response["status"]) == ("response", status)
    assert type(response["created_at"]) is int
    assert response["text"]["format"] == {"type": "text"}
    assert response["tool_choice"] == "auto" and response["truncation"] == "disabled"
    assert all(isinstance(response[name], float | int) for name in ("top_p", "temperature"))
    assert isinstance(response["metadata"], dict) and response["tools"] == []


def check_completed(response: dict[str, Any]) -> None:
    check_response(response, "completed")
    assert response["completed_at"] >= response["created_at"]
    (item,) = response["output"]
    check_item(item, "completed")
    (part,) = item["content"]
    check_part(part)
    assert part["text"]
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert type(usage["input_tokens_details"]["cached_tokens"]) is int
    assert type(usage["output_tokens_details"]["reasoning_tokens"]) is int


def check_item(item: dict[str, Any], status: str) -> None:
    assert item.keys() >= {"type", "id", "status", "role", "content"}
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", status)


def check_part(part: dict[str, Any]) -> None:
    assert part.keys() >= {"type", "text", "annotations", "logprobs"}
    assert (part["type"], part["annotations"]) == ("output_text", [])


@pytest.mark.parametrize("case", CASES)
@asynchronous
async def test_a_text_is_answered(case: str) -> None:
    async with echo_server(ENDING) as server:
        answer = await ask(server, input=CASES[case])
        assert answer.status == 200
        check_completed(answer.document)


@asynchronous
async def test_a_stream_has_every_event_with_every_field() -> None:
    async with echo_server(ENDING) as server:
        answer = await ask(server, input=CASES["basic-response"], stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *blocks, done = answer.body.decode().removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        kinds = []
        for number, block in enumerate(blocks):
            first, second = block.split("\n")
            event = json.loads(second.removeprefix("data: "))
            kinds.append(event["type"])
            assert first == f"event: {event['type']}"
            assert event["sequence_number"] == number
            assert set(EVENTS[event["type"]].split()) <= event.keys()
            if event["type"] in ("response.created", "response.in_progress"):
                check_response(event["response"], "in_progress")
            if "item" in event:
                is_done = event["type"].endswith("done")
                check_item(event["item"], "completed" if is_done else "in_progress")
            if "part" in event:
                check_part(event["part"])
        assert list(dict.fromkeys(kinds)) == list(EVENTS)
        check_completed(event["response"])


@asynchronous
async def test_tools_and_images_are_refused_by_name() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    async with echo_server(ENDING) as server:
        for stream in (False, True):
            answer = await ask(server, input="a", tools=[tool], stream=stream)
            assert (answer.status, answer.error["param"]) == (400, "tools")
            answer = await ask(server, input=[message("user", [image])], stream=stream)
            assert (answer.status, answer.error["param"]) == (400, "input[0].content[0].type")


CALL_EVENTS = {
    "response.output_item.added": _ITEM,
    "response.function_call_arguments.delta": f"{_ARGUMENTS} delta",
    "response.function_call_arguments.done": f"{_ARGUMENTS} arguments",
    "response.output_item.done": _ITEM,
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def check_call(item: dict[str, Any]) -> None:
    assert item.keys() >= {"type", "id", "call_id", "name", "arguments", "status"}
    assert (item["name"], item["status"]) == ("get_weather", "completed")
    assert json.loads(item["arguments"]).keys() == {"city"}


@asynchronous
async def test_a_tool_is_called(tmp_path: Path) -> None:
    """tool-calling, whole and streamed."""
    asked = {"input": CASES["basic-response"], "tools": [WEATHER]}
    async with scripted_server(chat_tokenizer(tmp_path)) as server:
        response = (await ask(server, **asked)).document
        assert set(RESPONSE.split()) <= response.keys() and response["status"] == "completed"
        (tool,) = response["tools"]
        assert tool.items() >= WEATHER.items() and tool.keys() >= {"strict"}
        assert response["output"][0].keys() >= {"type", "id", "summary"}
        for item in response["output"][2:]:
            check_call(item)
        answer = await ask(server, **asked, stream=True)
    *blocks, _ = answer.body.decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    called = [one for one in events if one.get("output_index") == 2]
    assert list(dict.fromkeys(one["type"] for one in called)) == list(CALL_EVENTS)
    for one in called:
        assert set(CALL_EVENTS[one["type"]].split()) <= one.keys()
    check_call(called[-1]["item"])
