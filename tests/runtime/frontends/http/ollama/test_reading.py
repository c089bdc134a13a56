"""Any body becomes a request input or an error of the request: nothing else is raised."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.ollama.fields import ChatFields, GenerateFields, Options
from trtc.runtime.frontends.http.ollama.request_inputs import (
    ParsedRequest,
    read_chat,
    read_generate,
)

READERS: dict[str, tuple[Any, Callable[[bytes, str], ParsedRequest[Any]]]] = {
    "chat": (ChatFields, read_chat),
    "generate": (GenerateFields, read_generate),
}
_KEYS = ("role", "content", "thinking", "tool_name", "tool_calls", "images", "function", "name")
_WORDS = st.sampled_from((*_KEYS, "user", "assistant", "tool", "arguments"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(_KEYS), VALUES | _WORDS), max_size=3)


def _names(kind: Any) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted({*kind.__struct_encode_fields__, *kind.refused}))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_body_becomes_a_draft_or_an_error(name: str, data: st.DataObject) -> None:
    kind, read = READERS[name]
    document = data.draw(st.dictionaries(_names(kind), VALUES, max_size=4))
    if data.draw(st.booleans()):
        document["options"] = data.draw(st.dictionaries(_names(Options), VALUES, max_size=4))
    if data.draw(st.booleans()):
        document["messages" if name == "chat" else "prompt"] = data.draw(MESSAGES | st.text())
    try:
        asked = read(json.dumps(document).encode(), "id")
    except InvalidRequestError as error:
        assert error.remedy
        return
    given_prompt = document.get("messages") or document.get("prompt") or document.get("system")
    assert (asked.request_input is not None) == bool(given_prompt)
