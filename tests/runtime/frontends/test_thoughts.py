"""A model that begins its thoughts itself keeps them under a grammar."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.aio import asynchronous
from tests.support.chat_templates import QWEN3_LIKE
from tests.support.openai_sdk import sdk
from tests.support.scripted import THOUGHT, chat_tokenizer, scripted_server
from tests.support.servers import TOKENIZER

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
DOCUMENT = '{"city": "Oslo"}'
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (
        DOCUMENT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
    ),
    "regex": (
        DOCUMENT,
        {"extra_body": {"structured_outputs": {"regex": '\\{"city": "[A-Z]\\w+"\\}'}}},
    ),
    "required": (CALL, {"tools": [TOOL], "tool_choice": "required"}),
    "beside a format": (CALL, {"tools": [TOOL], "response_format": {"type": "json_object"}}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose template tells thoughts from what an assistant said."""
    return chat_tokenizer(tmp_path_factory.mktemp("thinks"), QWEN3_LIKE)


def says(answer: str) -> Callable[[str], str]:
    return lambda prompt: f"<think>\n{THOUGHT}\n</think>\n\n{answer}"


async def _asked(tokenizer: Path, shape: str, **more: Any) -> tuple[Any, Any]:
    answer, fields = SHAPES[shape]
    async with scripted_server(tokenizer, says(answer)) as server, sdk(server) as client:
        whole = await client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "Where?"}],
            temperature=0,
            max_tokens=100,
            **{**fields, **more},
        )
    message = whole.choices[0].message
    return (message.model_extra or {}).get("reasoning"), message


@pytest.mark.parametrize("shape", SHAPES)
@asynchronous
async def test_a_thought_stands_before_a_shape(shape: str, tokenizer: Path) -> None:
    thought, message = await _asked(tokenizer, shape)
    assert thought == THOUGHT
    said = message.tool_calls[0].function.arguments if message.tool_calls else message.content
    assert json.loads(said) == {"city": "Oslo"}


@asynchronous
async def test_a_model_whose_template_shows_no_thoughts_has_none(tmp_path: Path) -> None:
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    plain = chat_tokenizer(tmp_path, config["chat_template"])
    thought, message = await _asked(plain, "schema")
    assert thought is None
    assert set(json.loads(message.content)) == {"city"}


@asynchronous
async def test_a_thought_that_is_turned_off_does_not_come(tokenizer: Path) -> None:
    thought, message = await _asked(tokenizer, "schema", extra_body={"enable_thinking": False})
    assert thought is None
    assert set(json.loads(message.content)) == {"city"}
