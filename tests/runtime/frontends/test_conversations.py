"""One table of conversations with tools and reasoning in the words of every dialect: what the chat
template is given, and what is asked of the answer, is the same."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tests.support.openai_sdk import ECHO
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.frontends.http.anthropic.fields import MessageFields
from trtc.runtime.frontends.http.anthropic.request_inputs import message_input
from trtc.runtime.frontends.http.bodies import read
from trtc.runtime.frontends.http.ollama.request_inputs import read_chat
from trtc.runtime.frontends.http.openai.fields import ChatFields, ResponseFields
from trtc.runtime.frontends.http.openai.request_inputs import chat_input
from trtc.runtime.frontends.http.openai.responses import response_input
from trtc.runtime.requests.generate_options import input_of_chat
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tool_choice import AUTO, ToolChoice
from trtc.runtime.requests.tools import ToolUse, shown, tool_use
from trtc.runtime.text.chat_template import ChatTemplate
from trtc.runtime.text.tokenizer import Tokenizer
from trtc.runtime.wire.messages import input_from_wire, input_to_wire

EVERYTHING = """
{{- messages | tojson(indent=1) }}
{{- tools | tojson }}
{{- [enable_thinking, thinking, reasoning_effort] if thinking is defined else 'as it is' }}
{{- add_generation_prompt }}{{ 'none' if messages[0].content is none }}
"""
"""A template that writes all that it is given."""
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "city": {"type": "string"}}}


class Function(NamedTuple):
    name: str
    description: str
    strict: bool | None = None


class Call(NamedTuple):
    id: str
    name: str
    arguments: Mapping[str, Any]


class Turn(NamedTuple):
    """What somebody said; a text of a tool is what a call gave."""

    role: str
    text: str = ""
    thoughts: str = ""
    calls: Sequence[Call] = ()
    answers: str = ""


class Conversation(NamedTuple):
    turns: Sequence[Turn]
    tools: Sequence[Function] = ()
    choice: ToolChoice = AUTO
    parallel: bool = True
    thinks: bool | None = None
    effort: str | None = None
    budget: int | None = None


WEATHER = Function("weather", "Weather <now>, in °C")
CLOCK = Function("clock", "The time", True)
OSLO = Call("c1", "weather", {"z": 1, "city": "Tromsø", "days": 2.5})
NOON = Call("c2", "clock", {})
ASKS = Turn("user", 'Weather in "Tromsø"?')
TABLE = {
    "plain": Conversation([Turn("system", "Be brief."), ASKS]),
    "tools": Conversation([ASKS], [WEATHER, CLOCK]),
    "a call and its result": Conversation(
        [
            Turn("system", "Be brief."),
            ASKS,
            Turn("assistant", calls=[OSLO]),
            Turn("tool", "-3 °C", answers="c1"),
        ],
        [WEATHER],
    ),
    "several calls beside a text and thoughts": Conversation(
        [
            ASKS,
            Turn("assistant", "I ask.", "Which tool?\nBoth.", [OSLO, NOON]),
            Turn("tool", "-3", answers="c1"),
            Turn("tool", '{"h": 12}', answers="c2"),
            Turn("assistant", "Cold.", "It is winter."),
            Turn("user", "And now?"),
        ],
        [WEATHER, CLOCK],
    ),
    "thoughts before a call alone": Conversation(
        [ASKS, Turn("assistant", "", "Hm.", [NOON]), Turn("tool", "12", answers="c2")], [CLOCK]
    ),
    "no tool may be called": Conversation([ASKS], [WEATHER], ToolChoice("none")),
    "one call at most": Conversation([ASKS], [WEATHER], parallel=False),
    "a call is required": Conversation([ASKS], [WEATHER, CLOCK], ToolChoice("required")),
    "one tool is required": Conversation(
        [ASKS], [WEATHER, CLOCK], ToolChoice("required", ("clock",))
    ),
    "one of several": Conversation([ASKS], [WEATHER, CLOCK], ToolChoice("auto", ("clock",))),
    "thinks": Conversation([ASKS], thinks=True),
    "does not think": Conversation([ASKS], thinks=False),
    "thinks much": Conversation([ASKS], effort="high"),
    "thinks so long": Conversation([ASKS], thinks=True, budget=7),
}


def openai_tools(asked: Conversation) -> list[dict[str, Any]]:
    return [{"type": "function", "function": _function(one, "parameters")} for one in asked.tools]


def _function(function: Function, schema: str) -> dict[str, Any]:
    strict = {} if function.strict is None else {"strict": function.strict}
    return {
        "name": function.name,
        "description": function.description,
        schema: SCHEMA,
        **strict,
    }


def openai_messages(asked: Conversation, *, as_text: bool = True) -> list[dict[str, Any]]:
    """Arguments are texts, or objects."""
    messages = []
    for turn in asked.turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            message["content"] = turn.text or None
            message["tool_calls"] = [
                {
                    "id": one.id,
                    "type": "function",
                    "function": {
                        "name": one.name,
                        "arguments": json.dumps(one.arguments, ensure_ascii=False)
                        if as_text
                        else one.arguments,
                    },
                }
                for one in turn.calls
            ]
        if turn.thoughts:
            message["reasoning_content"] = turn.thoughts
        if turn.answers:
            message["tool_call_id"] = turn.answers
        messages.append(message)
    return messages


def openai_choice(choice: ToolChoice, *, flat: bool) -> Any:
    if not choice.names:
        return choice.mode
    named = [
        {"type": "function", "name": one}
        if flat
        else {"type": "function", "function": {"name": one}}
        for one in choice.names
    ]
    if choice.mode == "required":
        return named[0]
    allowed = {"mode": choice.mode, "tools": named}
    return {"type": "allowed_tools", **(allowed if flat else {"allowed_tools": allowed})}


def given_only(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [], ())}


def chat_options(asked: Conversation) -> dict[str, Any]:
    """Beside the messages, as OpenAI's chat completions and calls in process name them."""
    return given_only(
        tools=openai_tools(asked),
        tool_choice=openai_choice(asked.choice, flat=False),
        parallel_tool_calls=asked.parallel,
        enable_thinking=asked.thinks,
        reasoning_effort=asked.effort,
        thinking_token_budget=asked.budget,
    )


def in_process(asked: Conversation) -> RequestInput:
    messages = openai_messages(asked, as_text=False)
    return input_of_chat(messages, chat_options(asked))  # type: ignore[arg-type]


def trtc_v1(asked: Conversation) -> RequestInput:
    data = input_to_wire(in_process(asked)).SerializeToString()
    return input_from_wire(pb.GenerateRequest.FromString(data))


def openai_chat(asked: Conversation) -> RequestInput:
    body = given_only(messages=openai_messages(asked), **chat_options(asked))
    return chat_input(read(json.dumps(body).encode(), ChatFields).fields, "id")


def openai_responses(asked: Conversation) -> RequestInput:
    items: list[dict[str, Any]] = []
    for turn in asked.turns:
        if turn.thoughts:
            part = {"type": "reasoning_text", "text": turn.thoughts}
            items.append({"type": "reasoning", "id": "rs", "summary": [], "content": [part]})
        if turn.answers:
            items.append(
                {"type": "function_call_output", "call_id": turn.answers, "output": turn.text}
            )
        elif turn.text:
            items.append({"type": "message", "role": turn.role, "content": turn.text})
        items += [
            {
                "type": "function_call",
                "call_id": one.id,
                "name": one.name,
                "arguments": json.dumps(one.arguments, ensure_ascii=False),
            }
            for one in turn.calls
        ]
    body = given_only(
        input=items,
        tools=[{"type": "function", **_function(one, "parameters")} for one in asked.tools],
        tool_choice=openai_choice(asked.choice, flat=True),
        parallel_tool_calls=asked.parallel,
        enable_thinking=asked.thinks,
        reasoning=None if asked.effort is None else {"effort": asked.effort},
        thinking_token_budget=asked.budget,
    )
    return response_input(read(json.dumps(body).encode(), ResponseFields).fields, "id")


def anthropic(asked: Conversation) -> RequestInput | None:
    """It has no choice of several tools, and thinking that is enabled has a budget."""
    if asked.choice.mode == "auto" and asked.choice.names:
        return None
    kinds = {"none": "none", "auto": "auto", "required": "tool" if asked.choice.names else "any"}
    choice: dict[str, Any] = {"type": kinds[asked.choice.mode]}
    if asked.choice.names:
        choice["name"] = asked.choice.names[0]
    if not asked.parallel:
        choice["disable_parallel_tool_use"] = True
    thinking = {None: None, False: {"type": "disabled"}, True: {"type": "adaptive"}}[asked.thinks]
    if asked.budget is not None:
        thinking = {"type": "enabled", "budget_tokens": asked.budget}  # type: ignore[dict-item]
    messages: list[dict[str, Any]] = []
    for turn in asked.turns:
        if turn.role == "system":
            continue
        blocks: list[dict[str, Any]] = []
        if turn.thoughts:
            blocks.append({"type": "thinking", "thinking": turn.thoughts, "signature": "s"})
        if turn.answers:
            blocks.append(
                {"type": "tool_result", "tool_use_id": turn.answers, "content": turn.text}
            )
        elif turn.text:
            blocks.append({"type": "text", "text": turn.text})
        blocks += [
            {"type": "tool_use", "id": one.id, "name": one.name, "input": one.arguments}
            for one in turn.calls
        ]
        role = "user" if turn.answers else turn.role
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    body = given_only(
        messages=messages,
        max_tokens=64,
        system="".join(one.text for one in asked.turns if one.role == "system") or None,
        tools=[_function(one, "input_schema") for one in asked.tools],
        tool_choice=choice,
        thinking=thinking,
        output_config=None if asked.effort is None else {"effort": asked.effort},
    )
    return message_input(read(json.dumps(body).encode(), MessageFields).fields, "id")


def ollama(asked: Conversation) -> RequestInput | None:
    """It has no choice of tools, and no budget."""
    if asked.choice != AUTO or not asked.parallel or asked.budget is not None:
        return None
    messages = [
        {
            ("thinking" if name == "reasoning_content" else name): value
            for name, value in one.items()
        }
        for one in openai_messages(asked, as_text=False)
    ]
    for message in messages:
        message["content"] = message["content"] or ""
    body = given_only(
        model="echo",
        messages=messages,
        tools=openai_tools(asked),
        think=asked.effort or asked.thinks,
    )
    return read_chat(json.dumps(body).encode(), "id").request_input


DIALECTS: Mapping[str, Callable[[Conversation], RequestInput | None]] = {
    "in process": in_process,
    "trtc.v1": trtc_v1,
    "OpenAI, chat completions": openai_chat,
    "OpenAI, responses": openai_responses,
    "Anthropic": anthropic,
    "Ollama": ollama,
}


class Asked(NamedTuple):
    """What comes of a request input, but for the shape in which its tools came."""

    prompt_ids: tuple[int, ...]
    tools: ToolUse | None
    budget: int | None


def asked_by(request_input: RequestInput, template: ChatTemplate, tokenizer: Tokenizer) -> Asked:
    assert request_input.chat is not None
    given = shown(request_input.chat, request_input.tool_choice).template_input()
    text = template.render(given.messages, given.variables)
    tools = tool_use(
        request_input.chat, request_input.tool_choice, parallel=request_input.parallel_tool_calls
    )
    return Asked(tokenizer.encode(text, False), tools, request_input.thinking_token_budget)


def test_a_conversation_is_the_same_in_every_dialect() -> None:
    assert ECHO.tokenizer is not None
    tokenizer, template = Tokenizer.load(ECHO.tokenizer), ChatTemplate(EVERYTHING, {})
    try:
        for name, conversation in TABLE.items():
            expected = asked_by(in_process(conversation), template, tokenizer)
            assert len(expected.prompt_ids) > 10
            for dialect, ask in DIALECTS.items():
                request_input = ask(conversation)
                if request_input is not None:
                    assert asked_by(request_input, template, tokenizer) == expected, (name, dialect)
    finally:
        template.close()
        tokenizer.close()


@pytest.mark.parametrize("name", TABLE)
def test_what_is_asked_is_what_the_table_says(name: str) -> None:
    asked = TABLE[name]
    request_input = in_process(asked)
    use = tool_use(
        request_input.chat, request_input.tool_choice, parallel=request_input.parallel_tool_calls
    )
    if not asked.tools or asked.choice.mode == "none":
        assert use is None
        return
    assert use is not None
    assert [one.name for one in use.tools] == [one.name for one in asked.tools]
    is_named = asked.choice.mode == "required" and len(asked.choice.names) == 1
    assert (use.choice, use.parallel) == (asked.choice, asked.parallel and not is_named)
    assert [one.strict for one in use.tools] == [bool(one.strict) for one in asked.tools]
    assert replace(request_input, tool_choice=AUTO).chat == request_input.chat
