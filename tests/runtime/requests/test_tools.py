"""Tools and their choice in every shape of the OpenAI API."""

import json
from typing import Any

import pytest

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.requests.generate_options import input_of_chat
from trtc.runtime.requests.tool_choice import AUTO, ToolChoice, tool_choice
from trtc.runtime.requests.tools import Tool, ToolUse, shown, tool_use
from trtc.runtime.text.chat import Chat, ChatMessage

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}}
NESTED = {
    "type": "function",
    "function": {"name": "f", "description": "Does f.", "parameters": SCHEMA, "strict": True},
}
FLAT = {"type": "function", **NESTED["function"]}  # type: ignore[dict-item]
BARE = {"name": "g"}


def chat_with(*tools: Any) -> Chat:
    return Chat((ChatMessage("user", "x"),), tools=json.dumps(tools))


@pytest.mark.parametrize("shape", [NESTED, FLAT])
def test_a_tool_keeps_what_is_said_of_it(shape: dict[str, Any]) -> None:
    use = tool_use(chat_with(shape, BARE))
    assert use is not None
    f, g = use.tools
    assert (f.name, f.description, f.strict) == ("f", "Does f.", True)
    assert list(json.loads(f.parameters)["properties"]) == ["z", "a"], "in its order"
    assert g == Tool("g")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("none", ToolChoice("none")),
        ("auto", AUTO),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", ("f",))),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NESTED]}},
            ToolChoice("required", ("f",)),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [FLAT, BARE]},
            ToolChoice("auto", ("f", "g")),
        ),
    ],
)
def test_a_choice_is_read_in_every_shape(value: Any, expected: ToolChoice | None) -> None:
    assert tool_choice(value) == expected


def test_a_choice_says_which_tools_may_be_called() -> None:
    f, g = Tool("f"), Tool("g")
    assert ToolUse((f, g), AUTO).callable == (f, g)
    assert ToolUse((f, g), ToolChoice("required", ("g",))).callable == (g,)


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        (ToolChoice("required", ("a",)), False),
        (ToolChoice("required", ("a", "b")), True),
        (ToolChoice("required"), True),
        (ToolChoice("auto", ("a",)), True),
    ],
)
def test_the_only_tool_that_has_to_be_called_is_called_once(
    choice: ToolChoice, parallel: bool
) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": name}} for name in "ab"])
    used = tool_use(Chat((ChatMessage("user", "?"),), tools=tools), choice)
    assert used is not None and used.parallel == parallel


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    chat = chat_with(NESTED)
    assert tool_use(chat, ToolChoice("none")) is None
    assert shown(chat, ToolChoice("none")).tools == ""
    assert shown(chat, ToolChoice("required")) == chat


def test_a_request_without_tools_has_none_to_choose_of() -> None:
    assert tool_use(None) is tool_use(chat_with(), ToolChoice("none")) is None
    for choice in (ToolChoice("required"), ToolChoice("auto", ("f",))):
        with pytest.raises(InvalidRequestError, match="is given without tools"):
            tool_use(chat_with(), choice)


def test_a_draft_carries_tools_and_reasoning() -> None:
    request_input = input_of_chat(
        [{"role": "user", "content": "x"}],
        {
            "tools": [NESTED],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "thinking_token_budget": 64,
            "chat_template_kwargs": {"thinking": False, "x": 1},
        },
    )
    assert request_input.chat is not None
    assert json.loads(request_input.chat.tools) == [NESTED]
    assert (request_input.tool_choice, request_input.parallel_tool_calls) == (
        ToolChoice("required", ("f",)),
        False,
    )
    assert request_input.thinking_token_budget == 64
    assert json.loads(request_input.chat.template_kwargs) == {
        "enable_thinking": True,
        "thinking": False,
        "reasoning_effort": "low",
        "x": 1,
    }


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({}, ""),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"chat_template_kwargs": {"thinking": True}}, {"thinking": True}),
    ],
)
def test_whether_a_model_reasons_is_said_to_its_template(given: Any, variables: Any) -> None:
    chat = input_of_chat([{"role": "user", "content": "x"}], given).chat
    assert chat is not None
    assert (json.loads(chat.template_kwargs) if variables else chat.template_kwargs) == variables


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"thinking_token_budget": "9"}, "thinking_token_budget"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"chat_template_kwargs": 5, "reasoning_effort": "low"}, "chat.template_kwargs"),
    ],
)
def test_an_option_of_another_kind_is_named(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        input_of_chat([{"role": "user", "content": "x"}], given)
    assert caught.value.field == field
