"""Structured outputs by the unmodified `openai` SDK, with its own parsing."""

import json
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.support.aio import asynchronous
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import echo_server
from trtc.runtime.requests.grammar import Grammar

MESSAGES: list[Any] = [{"role": "user", "content": "def f("}]


class Tag(BaseModel):
    label: Literal["a", "b"]
    is_new: bool


class Record(BaseModel):
    kind: Literal["person", "thing"]
    main: Tag
    other: Tag | None


SCHEMA = Record.model_json_schema()
SEED = 1
"""Of answers that end: white space may go on for ever, and the echo engine likes any token."""


@asynchronous
async def test_a_chat_is_parsed_as_a_model_of_pydantic() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.chat.completions.parse(
            model="echo", messages=MESSAGES, response_format=Record, max_tokens=600, n=2, seed=SEED
        )
        for choice in answer.choices:
            assert isinstance(choice.message.parsed, Record)
            assert choice.finish_reason == "stop"


@asynchronous
async def test_a_chat_is_streamed_as_a_model_of_pydantic() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        asked: Any = {"model": "echo", "messages": MESSAGES, "response_format": Record}
        async with client.chat.completions.stream(**asked, max_tokens=600, seed=SEED) as stream:
            answer = await stream.get_final_completion()
        assert isinstance(answer.choices[0].message.parsed, Record)


@asynchronous
async def test_a_response_is_parsed_as_a_model_of_pydantic() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        response = await client.responses.parse(
            model="echo", input="def f(", text_format=Record, max_output_tokens=600
        )
        assert isinstance(response.output_parsed, Record)
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
    ids=lambda one: next(iter(one)),
)
@asynchronous
async def test_a_completion_keeps_to_a_schema_by_every_name(extra: dict[str, Any]) -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.completions.create(
            model="echo", prompt="def f(", max_tokens=600, seed=SEED, extra_body=extra
        )
        jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)


TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "ab|cd"}}


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"regex": "ab|cd"}},
        {"structured_outputs": {"choice": ["ab", "cd"]}},
        {"structured_outputs": {"grammar": 'root ::= "ab" | "cd"'}},
        {"guided_regex": "ab|cd"},
        {"guided_choice": ["ab", "cd"]},
        {"guided_grammar": 'start: "ab" | "cd"'},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"structured_outputs": {"structural_tag": TAG}},
        {"response_format": TAG},
    ],
    ids=str,
)
@asynchronous
async def test_other_grammars_have_vllm_s_names(extra: dict[str, Any]) -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.chat.completions.create(
            model="echo", messages=MESSAGES, max_tokens=9, n=4, extra_body=extra
        )
        assert {one.message.content for one in answer.choices} <= {"ab", "cd"}


@asynchronous
async def test_an_answer_is_of_a_grammar_that_the_engine_has() -> None:
    engine = replace(ECHO, grammars={"word": Grammar("regex", "ab|cd", "grammar word")})
    async with echo_server(engine) as server, sdk(server) as client:
        (model,) = [one async for one in client.models.list()]
        assert model.model_dump()["grammars"] == ["word"]
        for name, is_known in (("word", True), ("other", False)):
            asked = client.chat.completions.create(
                model="echo",
                messages=MESSAGES,
                max_tokens=9,
                extra_body={"structured_outputs": {"named": name}},
            )
            if is_known:
                assert (await asked).choices[0].message.content in ("ab", "cd")
                continue
            with pytest.raises(openai.BadRequestError, match="Give one of word") as caught:
                await asked
            assert caught.value.param == "structured_outputs.named"


@asynchronous
async def test_a_structural_tag_in_its_legacy_form() -> None:
    """Tokens of "<" are made likely, and what begins with one is a tag."""
    tag: Any = {
        "type": "structural_tag",
        "structures": [{"begin": "<x>", "schema": {"const": 12}, "end": "</x>"}],
        "triggers": ["<"],
    }
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            max_tokens=40,
            response_format=tag,
            logit_bias={"31": 60},
            stop="</",
        )
        assert answer.choices[0].message.content == "<x>12"


@asynchronous
async def test_a_schema_that_cannot_be_held_is_a_bad_request() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        shape: Any = {"name": "x", "schema": {"not": {"type": "string"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="echo",
                messages=MESSAGES,
                response_format={"type": "json_schema", "json_schema": shape},
            )
        assert caught.value.param == "response_format.json_schema.schema"
        assert 'Unimplemented keys: ["not"]' in caught.value.message
        await server.idle()
