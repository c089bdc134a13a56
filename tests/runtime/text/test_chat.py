"""Conversations reach the template as Transformers would give them to it."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, cast

import pytest

from tests.support.chat_templates import (
    CHATML_WITH_TOOLS,
    GEMMA_LIKE,
    LLAMA3_LIKE,
    LOOPS_OVER_PARTS,
    MISTRAL_LIKE,
    QWEN3_LIKE,
    READS_DOCUMENTS,
)
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat import MAX_JSON_BYTES, Chat, ChatMessage, ContentPart, ToolCall
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.chat_template import ChatTemplate
from trtc.runtime.text.template_options import Message, TemplateOptions
from trtc.runtime.wire.messages import chat_from_wire, chat_to_wire

SOURCES = (
    CHATML_WITH_TOOLS,
    GEMMA_LIKE,
    LLAMA3_LIKE,
    LOOPS_OVER_PARTS,
    MISTRAL_LIKE,
    QWEN3_LIKE,
    READS_DOCUMENTS,
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": 'Weather in "Oslo" — é?'}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "weather", "arguments": {"z": 1, "city": "Oslo", "days": 2.0}},
        }
    ],
}
ANSWER = {"role": "tool", "content": '{"t": -3}', "tool_call_id": "call12345", "name": "weather"}
ASSISTANT = {"role": "assistant", "content": "\nCold. ", "reasoning_content": "\nIt is winter.\n"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}],
}
DOCUMENTS = [
    {"title": "Über <Oslo>", "text": "Cold.\n", "year": 2026, "tags": ["a", None, 1.5]},
    {"text": "x"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module", autouse=True)
def templates() -> Iterator[None]:
    yield
    for source in SOURCES:
        template_of(source).close()


@cache
def template_of(source: str) -> ChatTemplate:
    """One for all tests: it renders in processes."""
    return ChatTemplate(source, SPECIAL)


def render(source: str, messages: Sequence[Message], **options: Any) -> str:
    """Through both ends of the wire."""
    chat = chat_of(messages, cast(TemplateOptions, options))
    given = chat_from_wire(chat_to_wire(chat)).template_input()
    return template_of(source).render(
        given.messages,
        given.variables,
        continue_final_message=given.continue_final_message,
    )


def oracle(source: str, messages: Sequence[Message], **options: Any) -> str:
    """What Transformers renders."""
    from transformers.utils.chat_template_utils import render_jinja_template

    kwargs = options.pop("chat_template_kwargs", {})
    filled = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    texts, _ = render_jinja_template(
        [list(messages)], chat_template=source, **filled, **kwargs, **SPECIAL
    )
    return str(texts[0])


CASES: list[tuple[str, list[Message], dict[str, Any]]] = [
    (CHATML_WITH_TOOLS, [SYSTEM, USER], {}),
    (CHATML_WITH_TOOLS, [SYSTEM, USER], {"tools": [TOOL]}),
    (CHATML_WITH_TOOLS, [USER, {**CALL, "content": ""}, ANSWER], {"tools": [TOOL, TOOL]}),
    (CHATML_WITH_TOOLS, [{"role": "developer", "content": "x"}, USER], {}),
    (CHATML_WITH_TOOLS, [USER, ASSISTANT], {"add_generation_prompt": False}),
    (QWEN3_LIKE, [SYSTEM, USER], {}),
    (QWEN3_LIKE, [USER], {"chat_template_kwargs": {"enable_thinking": False}}),
    (QWEN3_LIKE, [USER], {"chat_template_kwargs": {"enable_thinking": True}}),
    (QWEN3_LIKE, [USER, ASSISTANT], {}),
    (QWEN3_LIKE, [USER, ASSISTANT], {"continue_final_message": True}),
    (LLAMA3_LIKE, [SYSTEM, USER, CALL, ANSWER], {"tools": [TOOL]}),
    (LLAMA3_LIKE, [USER], {"chat_template_kwargs": {"date_string": "1 Jan 2026"}}),
    (LLAMA3_LIKE, [USER], {}),
    (LLAMA3_LIKE, [USER, ASSISTANT], {"continue_final_message": True}),
    (MISTRAL_LIKE, [USER, CALL, ANSWER, ASSISTANT, USER], {}),
    (GEMMA_LIKE, [USER], {}),
    (GEMMA_LIKE, [SYSTEM, USER, ASSISTANT, PARTS], {}),
    (GEMMA_LIKE, [PARTS, ASSISTANT], {"continue_final_message": True}),
    (GEMMA_LIKE, [SYSTEM, USER, ASSISTANT], {"add_generation_prompt": False}),
    (READS_DOCUMENTS, [USER], {}),
    (READS_DOCUMENTS, [SYSTEM, USER], {"documents": DOCUMENTS}),
    (READS_DOCUMENTS, [USER], {"documents": DOCUMENTS, "tools": [TOOL]}),
    (LOOPS_OVER_PARTS, [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}], {}),
]


@pytest.mark.parametrize(("source", "messages", "options"), CASES)
def test_the_prompt_is_that_of_transformers(
    source: str, messages: list[Message], options: dict[str, Any]
) -> None:
    assert render(source, messages, **options) == oracle(source, messages, **options)


def test_arguments_may_be_json_text() -> None:
    function = {"name": "weather", "arguments": '{"z": 1, "city": "Oslo", "days": 2.0}'}
    call = {**CALL, "tool_calls": [{"id": "call12345", "function": function}]}
    assert render(MISTRAL_LIKE, [USER, call]) == render(MISTRAL_LIKE, [USER, CALL])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ call.arguments }}", '{"z":1}'),
        ("{{ 'x' ~ call['arguments'] }}", 'x{"z":1}'),
        ("{% set given = call.arguments %}{{ 'x' + given }}", 'x{"z":1}'),
        ("{{ call.arguments | tojson }}", '{"z": 1}'),
        ("{% set arguments = call.arguments | tojson %}{{ arguments }}", '{"z": 1}'),
        (
            "{% if call.arguments is string %}{{ call.arguments }}"
            "{% else %}{{ call.arguments | tojson }}{% endif %}",
            '{"z": 1}',
        ),
        ("{% for name in call.arguments %}{{ name }}{% endfor %}", "z"),
    ],
)
def test_arguments_are_a_text_for_a_template_that_writes_them(written: str, expected: str) -> None:
    template = ChatTemplate(
        "{% set call = messages[0].tool_calls[0].function %}" + written, SPECIAL
    )
    given = call_with('{"z":1}').template_input().messages[-1:]
    try:
        assert template.render(given) == expected
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content is none }}", "True"),
        ("{% if messages[0]['content'] == none %}null{% endif %}", "null"),
        ("{{ messages[0].content }}", ""),
        ("{% set content = messages[0].content %}{{ content is not none }}", "False"),
    ],
)
def test_a_content_that_is_null_is_so_for_a_template_that_tests_for_it(
    source: str, expected: str
) -> None:
    template = ChatTemplate(source, SPECIAL)
    given = chat_of([CALL], {}).template_input()
    try:
        assert template.render(given.messages, given.variables) == expected
    finally:
        template.close()


def test_a_template_that_refuses_the_roles_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequestError, match="must alternate"):
        render(MISTRAL_LIKE, [USER, USER])


def test_parts_are_joined_for_a_template_that_takes_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}
    joined = {"role": "user", "content": "a\nb"}
    assert render(CHATML_WITH_TOOLS, [parts]) == render(CHATML_WITH_TOOLS, [joined])


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([{"role": "user"}], {}, "chat.messages[0]"),
        ([USER, {**USER, "refusal": "no"}], {}, "chat.messages[1]"),
        ([USER, "hello"], {}, "chat.messages[1]"),
        ([{**USER, "content": 7}], {}, "chat.messages[0].content"),
        ([{**USER, "role": None, "content": [7]}], {}, "chat.messages[0].content[0]"),
        (
            [{**USER, "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            {},
            "chat.messages[0].content[0].type",
        ),
        ([{**CALL, "tool_calls": [{"id": "a"}]}], {}, "chat.messages[0].tool_calls[0].function"),
        ([USER], {"tools": [object()]}, "chat.tools"),
        ([USER], {"tools": ["weather"]}, "chat.tools[0]"),
        ([USER], {"documents": {"a": 1}}, "chat.documents"),
        ([USER], {"chat_template_kwargs": {"messages": []}}, "chat.template_kwargs"),
        ([USER], {"chat_template_kwargs": {"bos_token": ""}}, "chat.template_kwargs"),
        ([USER], {"chat_template_kwargs": {"__class__": ""}}, "chat.template_kwargs"),
        ([USER], {"chat_template_kwargs": {"a b": ""}}, "chat.template_kwargs"),
        (
            [USER],
            {"chat_template_kwargs": {f"a{n}": n for n in range(99)}},
            "chat.template_kwargs",
        ),
        (
            [USER, ASSISTANT],
            {"continue_final_message": True, "add_generation_prompt": True},
            "chat.continue_final_message",
        ),
        ([USER, CALL], {"continue_final_message": True}, "chat.continue_final_message"),
        ([], {}, "chat.messages"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_named(
    messages: list[Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(CHATML_WITH_TOOLS, messages, **options)
    assert caught.value.field == field


def call_with(arguments: str, **fields: Any) -> Chat:
    call = ToolCall(**{"name": "f", "arguments": arguments, **fields})
    user = ChatMessage("user", "x")
    return Chat((user, user, user, ChatMessage("assistant", tool_calls=(call,))))


NESTED = "[" * 33 + "]" * 33
ARGUMENTS = "chat.messages[3].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("chat", "field", "problem"),
    [
        (call_with("{"), ARGUMENTS, "is not JSON"),
        (call_with("[]"), ARGUMENTS, "another kind"),
        (call_with('{"a": ' + NESTED + "}"), ARGUMENTS, "nested too deeply"),
        (call_with('{"a": ' + "[" * 200_000), ARGUMENTS, "nested too deeply"),
        (call_with('"' + "x" * MAX_JSON_BYTES + '"'), ARGUMENTS, "characters"),
        (call_with("{}", type="code"), "chat.messages[3].tool_calls[0].type", "'code'"),
        (call_with("{}", name=""), "chat.messages[3].tool_calls[0].function.name", "is missing"),
        (
            Chat((ChatMessage("user", parts=(ContentPart("", "image_url"),)),)),
            "chat.messages[0].parts[0].type",
            "'image_url' is not supported",
        ),
        (
            Chat((ChatMessage("user", "a", parts=(ContentPart("b"),)),)),
            "chat.messages[0].parts",
            "beside content",
        ),
    ],
)
def test_what_a_message_of_the_wire_may_hold_is_bounded(
    chat: Chat, field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        chat.template_input()
    assert caught.value.field == field


def test_all_text_of_a_conversation_counts_towards_its_size() -> None:
    chat = chat_of([USER, CALL, ANSWER, ASSISTANT], {"tools": [TOOL]})
    texts = [USER["content"], ANSWER["content"], ASSISTANT["content"], chat.tools]
    assert chat.num_bytes > sum(len(str(text).encode()) for text in texts)
