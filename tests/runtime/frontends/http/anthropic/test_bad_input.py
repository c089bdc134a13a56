"""Every field that can be wrong: Anthropic's error, which names it, and nothing left behind."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.aio import asynchronous
from tests.support.http1 import Answer, exchange, post
from tests.support.http_asking import limited
from tests.support.servers import EchoEngine, RunningServer, echo_server
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.anthropic.fields import CountFields, MessageFields
from trtc.runtime.frontends.http.anthropic.request_inputs import counted, message_input
from trtc.runtime.frontends.http.bodies import read

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "a"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 4, **fields}


def message(**fields: Any) -> dict[str, Any]:
    return asked(messages=[USER, fields])


def block(**fields: Any) -> dict[str, Any]:
    return message(role="user", content=[{"type": "text", "text": "a"}, fields])


def said(**fields: Any) -> dict[str, Any]:
    return message(role="assistant", content=[{"type": "text", "text": "a"}, fields])


# a body, and what the error's message must say
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4}, "messages: is missing"),
    (asked(messages=[]), "messages: has no messages"),
    (asked(messages="hello"), "messages: expected array | null, got str"),
    (asked(messages=["hello"]), "messages[0]: expected object, got str"),
    (asked(messages=[USER, {"role": "assistant", "content": "b"}] * 20), "messages: has 40"),
    (asked(messages=[USER] * 300), "messages: has 300 blocks of one turn"),
    (message(content="a"), "messages[1].role: is missing"),
    (message(role="king", content="a"), "messages[1].role: is 'king'"),
    (message(role=["user"], content="a"), "messages[1].role: is \"['user']\""),
    (message(role="user"), "messages[1].content: is missing"),
    (message(role="user", content=None), "messages[1].content: is missing"),
    (message(role="user", content=5), "messages[1].content: is a int"),
    (message(role="user", content=[5]), "messages[1].content[0]: is a int"),
    (message(role="user", content="a", name="b"), "messages[1]: has 'name'"),
    (message(role="user", content=[{"type": "text", "text": ""}] * 257), "has 257 blocks"),
    (message(role="user", content="x" * 20_000), "messages: has 20"),
    (block(type="text", text=5), "messages[1].content[1].text: is a int"),
    (block(type="image", source={}), "messages[1].content[1].type: 'image' is not supported"),
    (block(type="tool_use", id="x"), "messages[1].content[1].type: 'tool_use' is not supported"),
    (block(type="thinking"), "messages[1].content[1].type: 'thinking' is not supported"),
    (block(type="tool_result"), "messages[1].content[1].tool_use_id: is missing"),
    (block(type="tool_result", tool_use_id=5), "messages[1].content[1].tool_use_id: is a int"),
    (
        block(type="tool_result", tool_use_id="x", content=5),
        "messages[1].content[1].content: is a int",
    ),
    (
        block(type="tool_result", tool_use_id="x", content=[{"type": "image"}]),
        "messages[1].content[1].content[0].type: 'image' is not supported",
    ),
    (said(type="tool_use", name="f", input={}), "messages[1].content[1].id: is missing"),
    (said(type="tool_use", id="x", input={}), "messages[1].content[1].name: is missing"),
    (
        said(type="tool_use", id="x", name="f", input="{}"),
        "messages[1].content[1].input: is a str",
    ),
    (said(type="thinking"), "messages[1].content[1].thinking: is missing"),
    (said(type="thinking", thinking=5), "messages[1].content[1].thinking: is a int"),
    (said(type="tool_result", tool_use_id="x"), "messages[1].content[1].type: 'tool_result' is"),
    (block(type="document"), "messages[1].content[1].type: 'document' is not supported"),
    (asked(system=5), "system: expected"),
    (asked(system=[5]), "system[0]: expected object, got int"),
    (asked(system=[{"type": "image"}]), "system[0].type: 'image' is not supported"),
    (asked(system=[{"type": "text", "text": 5}]), "system[0].text: is a int"),
    (asked(system=[{"type": "text", "text": ""}] * 257), "system: has 257 blocks"),
    (asked(model=5), "model: expected str | null, got int"),
    ({"messages": [USER]}, "max_tokens: is missing"),
    (asked(max_tokens=0), "max_tokens: is 0"),
    (asked(max_tokens=-1), "max_tokens: is -1"),
    (asked(max_tokens="9"), "max_tokens: expected int | null, got str"),
    (asked(max_tokens=4096), "maximum context length is 1024 tokens"),
    (asked(stop_sequences="a"), "stop_sequences: expected array | null, got str"),
    (asked(stop_sequences=[""]), "stop_sequences"),
    (asked(stop_sequences=["a"] * 17), "stop_sequences (how many): is 17"),
    (asked(stop_sequences=["x" * 600]), "stop_sequences"),
    (asked(stop_sequences=[1]), "stop_sequences[0]: expected str, got int"),
    (asked(temperature=-1), "temperature: is -1"),
    (asked(temperature="hot"), "temperature: expected float | null, got str"),
    (asked(top_p=0), "top_p: is 0"),
    (asked(top_k=-2), "top_k: is -2"),
    (asked(seed=2**64), "seed: is 18446744073709551616"),
    (asked(stream="yes"), "stream: expected bool | null, got str"),
    (asked(tools=[TOOL]), "tools: is not supported"),
    (asked(tools=5), "tools: expected array | null, got int"),
    (asked(tools=[{"name": "f"}]), "tools[0].input_schema: is missing"),
    (asked(tools=[{**TOOL, "input_schema": "{}"}]), "tools[0].input_schema: is a str"),
    (asked(tools=[{**TOOL, "name": "a b"}]), "tools[0].name: is 'a b'"),
    (asked(tools=[TOOL, TOOL]), "tools[1]: 'f' is given twice"),
    (asked(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0].type: 'bash_20250124'"),
    (asked(tool_choice={"type": "any"}), "tool_choice: is given without tools"),
    (asked(tool_choice={"type": "most"}), "tool_choice.type: Invalid enum value 'most'"),
    (asked(tools=[TOOL], tool_choice={"type": "tool"}), "tool_choice.name: is missing"),
    (asked(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}), "tool_choice: names 'g'"),
    (asked(thinking={"type": "enabled"}), "thinking.budget_tokens: is missing"),
    (asked(thinking={"type": "enabled", "budget_tokens": 4}), "thinking.budget_tokens: is 4"),
    (
        asked(thinking={"type": "enabled", "budget_tokens": 2}),
        "thinking.budget_tokens: is not supported",
    ),
    (asked(thinking={"type": "much"}), "thinking.type: Invalid enum value 'much'"),
    (asked(output_config={"effort": "most"}), "output_config.effort: is 'most'"),
    (asked(output_config={"format": {"type": "text/html"}}), "output_config.format.type: is"),
    (
        asked(output_config={"format": {"type": "json_schema", "schema": {"not": {}}}}),
        'output_config.format.schema: cannot be compiled: Unimplemented keys: ["not"]',
    ),
    (asked(mcp_servers=[{}]), "mcp_servers: is not supported"),
    (asked(container="x"), "container: is not supported"),
]


async def ask(server: RunningServer, body: Any, *headers: str, path: str = MESSAGES) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await exchange(server.http_port, post(path, data, *headers))


def check(answer: Answer, status: int, kind: str, said: str) -> None:
    what = answer.body[:300]
    assert answer.status == status, what
    document = answer.document
    assert document.keys() == {"type", "error", "request_id"} and document["type"] == "error"
    assert document["error"].keys() == {"type", "message"}
    assert document["error"]["type"] == kind, what
    assert said in document["error"]["message"], what
    assert len(document["error"]["message"]) < 1100
    assert document["request_id"] == answer.headers["request-id"]


async def still_serves(server: RunningServer) -> None:
    await server.idle()
    answer = await ask(server, asked())
    assert (answer.status, answer.document["usage"]["output_tokens"]) == (200, 4)


@asynchronous
async def test_every_bad_field_is_named_and_nothing_is_left() -> None:
    async with limited() as server:
        for body, said in BAD:
            check(await ask(server, body), 400, "invalid_request_error", said)
            streamed = {"stream": True, **body}
            check(await ask(server, streamed), 400, "invalid_request_error", said)
        await still_serves(server)


@asynchronous
async def test_both_routes_refuse_by_the_kind_of_error() -> None:
    async with limited() as server:
        for path in (MESSAGES, COUNT):
            missing = await ask(server, asked(model="other"), path=path)
            check(missing, 404, "not_found_error", "model: no engine is called 'other'")
        wrong = await ask(server, {"messages": [{"role": "user"}]}, path=COUNT)
        check(wrong, 400, "invalid_request_error", "messages[0].content: is missing")
        await still_serves(server)


@asynchronous
async def test_versions_of_the_api_that_are_not_known_are_refused() -> None:
    async with limited() as server:
        for version in ("2023-06-01", "2026-10-21"):
            answer = await ask(server, asked(temperature=0), f"anthropic-version: {version}")
            assert answer.status == 200
        for version in ("2023-01-01", "2099-01-01", "\xe9" * 100):
            answer = await ask(server, asked(), f"anthropic-version: {version}")
            check(answer, 400, "invalid_request_error", "Send one of 2023-06-01, 2026-10-21")
        await still_serves(server)


@asynchronous
async def test_an_engine_without_a_tokenizer_has_no_messages() -> None:
    async with echo_server(EchoEngine()) as server:
        for path in (MESSAGES, COUNT):
            answer = await ask(server, asked(), path=path)
            check(answer, 400, "invalid_request_error", "messages: ")


_WORDS = st.sampled_from(
    ("user", "assistant", "system", "text", "image", "role", "content", "type")
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_WORDS | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": _WORDS, "content": _VALUES}), max_size=4
)
_NAMES = sorted({*MessageFields.__struct_fields__, *MessageFields.refused})


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@given(
    document=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5),
    messages=_VALUES | _MESSAGES,
)
@settings(max_examples=150)
def test_any_document_is_read_or_refused(path: str, document: Any, messages: Any) -> None:
    body = json.dumps({"max_tokens": 1, **document, "messages": messages}).encode()
    try:
        if path == MESSAGES:
            message_input(read(body, MessageFields).fields, "id")
        else:
            counted(read(body, CountFields).fields)
    except InvalidRequestError as error:
        assert str(error)
