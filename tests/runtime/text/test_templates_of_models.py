"""Templates in the documented formats of model families render as by Transformers.

Each file of `templates/` was written for this test, after what the family's authors document of
their format. Transformers is given the messages as its own documentation words them: arguments of
calls as objects, or as JSON text where the template writes them as they are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.chat_template import ChatTemplate
from trtc.runtime.text.template_options import TemplateOptions

FOLDER = Path(__file__).parent / "templates"
TOOL_USE = "command_r_tool_use"
"""Of a checkpoint that has a template for conversations with tools, and one for others."""
NAMES = sorted({path.stem for path in FOLDER.glob("*.jinja")} - {TOOL_USE})
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS_AS_TEXT = frozenset({"deepseek_v3", "deepseek_r1", "deepseek_v3_1"})
"""Templates that join arguments to other texts."""
NULL_CONTENTS = frozenset(
    {
        *("deepseek_v3", "deepseek_r1", "deepseek_v3_1", "kimi_k2", "llama4", "mistral_tekken"),
        "olmo3",
    }
)
"""Templates that tell a content that is null from an empty one."""

SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": 'Weather in "Oslo" — é <now>?'}
ANSWER = {"role": "assistant", "content": "\nCold. "}
THOUGHT = {**ANSWER, "reasoning_content": "\nIt is winter.\n"}
TAGGED = {"role": "assistant", "content": "<think>\nWinter.\n</think>\n\nCold."}
ARGUMENTS = {"z": 1, "city": "Tromsø <N>", "days": 2.5, "deep": {"a": [1, None, True]}}
SCHEMA = {
    "type": "object",
    "properties": {
        "z": {"type": "integer", "description": "Up", "default": 3},
        "city": {"type": "string", "enum": ["Oslo", "Tromsø <N>"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "any": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather <now>, °C", "parameters": SCHEMA},
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}},
    },
}
DOCUMENTS = [{"doc_id": 1, "title": "Über", "text": "Cold."}, {"doc_id": 2, "text": "x"}]


def call(*calls: tuple[str, str, Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    """A message of the assistant that calls tools."""
    listed = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed, **fields}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


ONE = call(("call12345", "weather", ARGUMENTS))
TWO = call(("call12345", "weather", ARGUMENTS), ("call67890", "clock", {}))
COLD, NOON = result("call12345", '{"t": -3}'), result("call67890", "12")
PLAIN: Mapping[str, tuple[Sequence[Any], Mapping[str, Any]]] = {
    "a question": ([USER], {}),
    "a system's message": ([SYSTEM, USER], {}),
    "several turns": ([SYSTEM, USER, ANSWER, USER], {}),
    "no prompt of the answer": ([USER, ANSWER], {"add_generation_prompt": False}),
    "an answer that goes on": ([USER, TAGGED], {"continue_final_message": True}),
    "thoughts": ([USER, THOUGHT, USER], {}),
    "thoughts at the end": ([USER, THOUGHT], {"add_generation_prompt": False}),
    "tagged thoughts": ([USER, TAGGED, USER], {}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "thinking": ([USER], {"enable_thinking": True}),
    "effort": ([SYSTEM, USER], {"reasoning_effort": "high"}),
    "variables": (
        [USER],
        {"chat_template_kwargs": {"date_string": "1 Jan 2026", "controls": {"citations": True}}},
    ),
    "documents": ([USER], {"documents": DOCUMENTS}),
    "another role": ([USER, {"role": "king", "content": "x"}, USER], {}),
    "two users": ([USER, USER], {}),
}
TOOLS: Mapping[str, tuple[Sequence[Any], Mapping[str, Any]]] = {
    "tools": ([USER], {"tools": [WEATHER]}),
    "tools and a system's message": ([SYSTEM, USER], {"tools": [WEATHER, CLOCK]}),
    "a call": ([USER, ONE], {"tools": [WEATHER], "add_generation_prompt": False}),
    "a result": ([USER, ONE, COLD], {"tools": [WEATHER]}),
    "an answer after it": ([SYSTEM, USER, ONE, COLD, ANSWER, USER], {"tools": [WEATHER]}),
    "two calls": ([USER, TWO, COLD, NOON], {"tools": [WEATHER, CLOCK]}),
    "two calls, then one": ([USER, TWO, COLD, NOON, ONE, COLD], {"tools": [WEATHER, CLOCK]}),
    "a text beside a call": ([USER, {**ONE, "content": "I ask."}, COLD], {"tools": [WEATHER]}),
    "a thought before a call": (
        [USER, {**ONE, "reasoning_content": "Hm."}, COLD],
        {"tools": [WEATHER], "enable_thinking": True},
    ),
    "no tools any more": ([USER, ONE, COLD], {}),
    "tools and documents": ([USER], {"tools": [WEATHER], "documents": DOCUMENTS}),
}
CASES = {**PLAIN, **TOOLS}


@pytest.fixture(scope="module", autouse=True)
def templates() -> Iterator[None]:
    yield
    for name in NAMES:
        template_of(name).close()
    template_of.cache_clear()


@cache
def template_of(name: str) -> ChatTemplate:
    tools = ChatTemplate(source_of(TOOL_USE), SPECIAL) if name == "command_r" else None
    return ChatTemplate(source_of(name), SPECIAL, tool_use=tools)


def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def rendered(name: str, messages: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """By this runtime; None: the template refuses."""
    chat = chat_of(messages, TemplateOptions(**options)).template_input()  # type: ignore[typeddict-item]
    try:
        return template_of(name).render(
            chat.messages, chat.variables, continue_final_message=chat.continue_final_message
        )
    except InvalidRequestError:
        return None


def expected(name: str, messages: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """By Transformers; None: the template refuses."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    given = dict(options)
    variables = dict(given.pop("chat_template_kwargs", {}))
    thinks, effort = given.pop("enable_thinking", None), given.pop("reasoning_effort", None)
    if effort is not None:
        thinks, variables["reasoning_effort"] = True, effort
    if thinks is not None:
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    given.setdefault("add_generation_prompt", not given.get("continue_final_message"))
    try:
        texts, _ = render_jinja_template(
            [[_as_documented(name, one) for one in messages]],
            chat_template=source_of(
                TOOL_USE if name == "command_r" and options.get("tools") else name
            ),
            **given,
            **variables,
            **SPECIAL,
        )
    except (TemplateError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    return str(texts[0])


def _as_documented(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(message)
    if given["content"] is None and name not in NULL_CONTENTS:
        given["content"] = ""
    if name in ARGUMENTS_AS_TEXT and "tool_calls" in given:
        given["tool_calls"] = [
            {
                **one,
                "function": {
                    **one["function"],
                    "arguments": json.dumps(one["function"]["arguments"], ensure_ascii=False),
                },
            }
            for one in given["tool_calls"]
        ]
    return given


def test_the_set_has_templates_of_many_families() -> None:
    assert len(NAMES) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_as_by_transformers(name: str) -> None:
    told = {case: rendered(name, *CASES[case]) for case in CASES}
    assert told == {case: expected(name, *CASES[case]) for case in CASES}
    assert told["a question"], "a template that refuses everything shows nothing"
    assert sum(text is not None for text in told.values()) >= len(CASES) // 3


_TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(("</think>", "<think>\n", "{{ x }}", "{% if %}", " \n", '"', "/no_think")),
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.just(2.5) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)
_TURNS = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], _TEXTS),
    st.builds(
        lambda text, thought: [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": text, "reasoning_content": thought or "x"},
        ],
        _TEXTS,
        _TEXTS,
    ),
    st.builds(
        lambda arguments, text: [
            {"role": "user", "content": "?"},
            call(("call12345", "weather", arguments)),
            result("call12345", text),
        ],
        st.dictionaries(st.sampled_from(["city", "z", "é"]), _VALUES, max_size=3),
        _TEXTS,
    ),
)


@given(
    name=st.sampled_from(NAMES),
    system=st.none() | _TEXTS,
    turns=st.lists(_TURNS, min_size=1, max_size=4),
    tools=st.sampled_from(([], [WEATHER], [CLOCK, WEATHER])),
    thinks=st.none() | st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_conversation_renders_as_by_transformers(
    name: str,
    system: str | None,
    turns: Sequence[Sequence[Mapping[str, Any]]],
    tools: Sequence[Mapping[str, Any]],
    thinks: bool | None,
) -> None:
    before = [] if system is None else [{"role": "system", "content": system}]
    messages = [*before, *(message for turn in turns for message in turn)]
    options = {"tools": tools or None, "enable_thinking": thinks}
    assert rendered(name, messages, options) == expected(name, messages, options)
