"""Any body becomes a request input or an error of the request: nothing else is raised."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.openai.fields import (
    ChatFields,
    CommonFields,
    CompletionFields,
    ResponseFields,
)
from trtc.runtime.frontends.http.openai.request_inputs import chat_input, completion_inputs
from trtc.runtime.frontends.http.openai.responses import response_input

Read = tuple[type[CommonFields], Callable[[Any, str], Any]]
READERS: dict[str, Read] = {
    "chat": (ChatFields, chat_input),
    "completion": (CompletionFields, completion_inputs),
    "response": (ResponseFields, response_input),
}
NAMES = sorted(
    {name for kind, _ in READERS.values() for name in (*kind.__struct_fields__, *kind.refused)}
)
_WORDS = st.sampled_from(
    (
        *("user", "assistant", "tool", "text", "message", "input_text", "function_call", "role"),
        *("type", "content", "name", "arguments", "function", "tool_calls", "call_id", "output"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_WORDS | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": _WORDS,
            "type": _WORDS,
            "content": VALUES,
            "tool_calls": VALUES,
            "output": VALUES,
            "name": VALUES,
        },
    ),
    max_size=3,
)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)


def outcome(endpoint: str, body: bytes) -> Given[Any] | str:
    """What is read, or the message of the refusal."""
    kind, request_input = READERS[endpoint]
    try:
        given = read(body, kind)
        request_input(given.fields, "id")
    except InvalidRequestError as error:
        assert str(error)
        return str(error)
    return given


@pytest.mark.parametrize("endpoint", READERS)
@given(document=DOCUMENTS, prompt=VALUES | MESSAGES)
@settings(max_examples=100)
def test_any_document_is_read_or_refused(endpoint: str, document: Any, prompt: Any) -> None:
    for name in ("messages", "prompt", "input"):
        outcome(endpoint, json.dumps({**document, name: prompt}).encode(errors="surrogatepass"))


@pytest.mark.parametrize("endpoint", READERS)
@given(body=st.binary(max_size=40))
@example(body=b"")
@settings(max_examples=60)
def test_any_bytes_are_read_or_refused(endpoint: str, body: bytes) -> None:
    outcome(endpoint, body)


@pytest.mark.parametrize("endpoint", READERS)
@given(names=st.lists(st.text(max_size=80), max_size=50))
@settings(max_examples=40)
def test_names_that_are_ignored_make_a_header_that_can_be_sent(
    endpoint: str, names: list[str]
) -> None:
    prompts = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    document = {**dict.fromkeys(names, 1), **prompts}
    given = outcome(endpoint, json.dumps(document).encode())
    if isinstance(given, Given):
        ((_, listed),) = given.headers  # the other endpoints' prompts, at least
        assert listed.isascii() and len(listed) < 2500
        assert not {b"\r", b"\n"} & {listed[at : at + 1] for at in range(len(listed))}
