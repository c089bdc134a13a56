"""Structural tags: what is read under one, against a slow reference and xgrammar's docs."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.grammars import TextReader, grammar_engine, pyllama_grammars, tokens_of
from tests.support.servers import EOS, TOKENIZER
from tests.support.tag_oracle import Format, matches, random_format, random_text
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.text.tokenizer import Tokenizer

CALL: Format = {
    "type": "tag",
    "begin": "<function=f>",
    "content": {"type": "json_schema", "json_schema": {"const": [1]}},
    "end": "</function>",
}
NUMBER: Format = {
    "type": "tag",
    "begin": "<function=g>",
    "content": {"type": "regex", "pattern": "[0-9<]+"},
    "end": "</function>",
}
CALLS: Format = {"type": "triggered_tags", "triggers": ["<function="], "tags": [CALL, NUMBER]}
THOUGHT: Format = {
    "type": "tag",
    "begin": "<think>",
    "content": {"type": "any_text"},
    "end": "</think>",
}
START, PAD = 1, 3
"""Special tokens of pyllama's tokenizer: <|im_start|>, <|pad|>."""


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with pyllama_grammars() as opened:
        yield opened


@pytest.fixture(scope="module")
def reader(grammars: Grammars) -> Iterator[TextReader]:
    tokenizer = Tokenizer.load(TOKENIZER)
    yield TextReader(grammars, tokenizer)
    tokenizer.close()


def tag(format: Format) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


CASES: dict[str, tuple[Format, list[str], list[str]]] = {
    "calls in text": (
        CALLS,
        [
            "",
            "no call <function",
            "x <function=f>[1]</function>",
            "<function=f>[ 1 ]</function>, <function=g>12<</function>.",
        ],
        [
            "<function=h>",
            "<function=f>[2]</function>",
            "<function=f>[1]",
            "<function=f> [1]</function>",
        ],
    ),
    "a call and nothing else": (
        {**CALLS, "at_least_one": True, "stop_after_first": True},
        ["<function=f>[1]</function>"],
        ["", " <function=f>[1]</function>", "<function=f>[1]</function> "],
    ),
    "a call first": (
        {**CALLS, "at_least_one": True},
        ["<function=f>[1]</function>", "<function=f>[1]</function> <function=g>1</function>."],
        ["", " <function=f>[1]</function>"],
    ),
    "one call at most": (
        {**CALLS, "stop_after_first": True},
        ["", "x", "x<function=f>[1]</function>"],
        ["<function=f>[1]</function> "],
    ),
    "text without a word": (
        {**CALLS, "excludes": ["END"]},
        ["EN", "x<function=f>[1]</function>"],
        ["END", "xEND<function=f>[1]</function>"],
    ),
    "a thought, then calls": (
        {"type": "sequence", "elements": [THOUGHT, CALLS]},
        ["<think></think>", "<think>a<function=h></think>b<function=f>[1]</function>"],
        ["", "<think>", "<think></think><function=h>"],
    ),
    "a short thought": (
        {**THOUGHT, "content": {"type": "any_text", "max_chars": 2}, "end": ["</think>", "!"]},
        ["<think>é日</think>", "<think>!"],
        ["<think>abc</think>"],
    ),
    "a list of calls": (
        {"type": "tags_with_separator", "tags": [CALL, NUMBER], "separator": ", "},
        ["", "<function=f>[1]</function>", "<function=g>1</function>, <function=g>2</function>"],
        ["<function=g>1</function>,", "<function=g>1</function><function=g>2</function>"],
    ),
    "one of a list": (
        {
            "type": "tags_with_separator",
            "tags": [CALL],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<function=f>[1]</function>"],
        ["", "<function=f>[1]</function>,<function=f>[1]</function>"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["n=", {"type": "regex", "pattern": "[0-9]"}]]},
        ["", "a n=1 n=2b", "n"],
        ["n=", "n=x"],
    ),
    "dispatch once, up to a text": (
        {
            "type": "sequence",
            "elements": [
                {
                    "type": "dispatch",
                    "rules": [["n=", {"type": "json_schema", "json_schema": True}]],
                    "loop": False,
                    "excludes": ["</end>"],
                },
                {"type": "const_string", "value": "</end>"},
            ],
        },
        ["a</end>", "a n=[2]</end>"],
        ["", "a n=[2] n=[3]</end>", "a</end>b"],
    ),
    "a grammar": (
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "("},
                {"type": "grammar", "grammar": 'root ::= "a" root | "b"'},
                {"type": "grammar", "grammar": 'start: "c"+'},
                {"type": "const_string", "value": ")"},
            ],
        },
        ["(aabc)", "(bcc)"],
        ["(ac)", "(b)"],
    ),
    "a tag without an end": (
        {**THOUGHT, "content": CALLS, "end": ""},
        ["<think>a", "<think><function=f>[1]</function>b"],
        ["<think><function=h>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_are_read_as_documented(name: str, reader: TextReader) -> None:
    format, good, bad = CASES[name]
    assert [text for text in good if not reader.reads(tag(format), text)] == []
    assert [text for text in bad if reader.reads(tag(format), text)] == []


def test_texts_are_read_as_the_slow_reference_does(reader: TextReader) -> None:
    num_read = 0
    for seed in range(150):
        rng = random.Random(seed)
        format = random_format(rng)
        for _ in range(3):
            text = random_text(format, rng)
            expected = matches(format, text)
            assert reader.reads(tag(format), text) == expected, (format, text)
            num_read += expected
    assert num_read > 100


def test_the_legacy_form_is_one_of_triggered_tags(reader: TextReader) -> None:
    whole = {
        "structures": [
            {"begin": "<function=f>", "schema": {"const": [1]}, "end": "</function>"},
            {"begin": "<function=g>", "schema": '{"type": "integer"}', "end": "</function>"},
        ],
        "triggers": ["<function="],
    }
    legacy = Grammar("structural_tag", json.dumps(whole))
    for text in ("a", "a<function=f>[1]</function>b", "<function=g>5</function>"):
        assert reader.reads(legacy, text)
    for text in ("<function=f>1</function>", "<function=g>a</function>", "<function=h>"):
        assert not reader.reads(legacy, text)


def after(grammars: Grammars, format: Format, output: list[int]) -> set[int]:
    return tokens_of(grammars.masks(tag(format), 1).allowed(output))


def test_tokens_stand_beside_text(grammars: Grammars) -> None:
    """A model's marks are tokens, and no text is one."""
    token: Any = {"type": "token", "token": "<|im_start|>"}
    call = {**CALL, "begin": token, "end": {"type": "token", "token": PAD}}
    calls = {"type": "token_triggered_tags", "trigger_tokens": ["<|im_start|>"], "tags": [call]}
    assert {EOS, START, 40} <= after(grammars, calls, [])
    begun = after(grammars, calls, [40, START])
    assert EOS not in begun
    assert START not in begun
    written = Tokenizer.load(TOKENIZER).encode("[1]", add_special_tokens=False)
    assert after(grammars, calls, [START, *written]) >= {PAD}
    assert {EOS, START} <= after(grammars, calls, [START, *written, PAD])
    only = {**calls, "at_least_one": True, "stop_after_first": True}
    assert after(grammars, only, []) == {START}
    assert after(grammars, only, [START, *written, PAD]) == {EOS}


def test_any_tokens_end_where_their_tag_does(grammars: Grammars) -> None:
    free = {
        "type": "tag",
        "begin": {"type": "token", "token": START},
        "content": {"type": "any_tokens", "exclude_tokens": [40], "max_tokens": 2},
        "end": {"type": "token", "token": PAD},
    }
    inside = after(grammars, free, [START, 41])
    assert {START, PAD, 41} <= inside
    assert not {EOS, 40} & inside
    assert after(grammars, free, [START, 41, 41]) == {PAD}
    one = {**free, "content": {"type": "exclude_token", "exclude_tokens": ["<|im_start|>"]}}
    assert not {EOS, START, PAD} & after(grammars, one, [START])
    dispatch = {"type": "token_dispatch", "rules": [[PAD, {"type": "const_string", "value": "a"}]]}
    assert {EOS, PAD, START} <= after(grammars, dispatch, [START])
    assert EOS not in after(grammars, dispatch, [START, PAD])


def deep(levels: int) -> str:
    open_, close = '{"type":"optional","content":', "}"
    return '{"format":' + open_ * levels + '{"type":"regex","pattern":"a"}' + close * levels + "}"


REFUSED: dict[str, tuple[str, str]] = {
    "no object": ("[]", "Expected `object`"),
    "no json": ("{", "Input data was truncated"),
    "nothing": ("{}", "missing required field `format`"),
    "unknown format": ('{"format": {"type": "xml"}}', "'xml' - at `$.format.type`"),
    "style": (
        '{"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}',
        "'qwen_xml' - at `$.format.style`",
    ),
    "any order": (
        '{"format": {"type": "json_schema", "json_schema": {}, "any_order": true}}',
        "`$.format.any_order`",
    ),
    "max tokens of text": (
        '{"format": {"type": "any_text", "max_tokens": 5}}',
        "`$.format.max_tokens`",
    ),
    "unknown field": ('{"format": {"type": "any_text", "until": "a"}}', "unknown field `until`"),
    "keyword": (
        '{"format": {"type": "json_schema", "json_schema": {"not": {}}}}',
        'Unimplemented keys: ["not"]',
    ),
    "text in the middle": (
        json.dumps({"format": {"type": "sequence", "elements": [{"type": "any_text"}, CALL]}}),
        "nothing ends any_text",
    ),
    "endless repetition": (
        '{"format": {"type": "star", "content": {"type": "any_text"}}}',
        "nothing ends any_text",
    ),
    "tokens up to a text": (
        json.dumps({"format": {**THOUGHT, "content": {"type": "any_tokens"}}}),
        "nothing ends any_tokens",
    ),
    "no such token": (
        '{"format": {"type": "token", "token": "<|other|>"}}',
        "no added token '<|other|>'",
    ),
    "no such id": ('{"format": {"type": "token", "token": 9999999}}', "cannot be compiled"),
    "negative id": ('{"format": {"type": "token", "token": -1}}', "-1 is no token"),
    "trigger of no tag": (
        json.dumps({"format": {**CALLS, "triggers": ["<function=", "<tool>"]}}),
        "no tag begins with the trigger '<tool>'",
    ),
    "tag of no trigger": (
        json.dumps({"format": {**CALLS, "triggers": ["<tool>"]}}),
        "no trigger begins the tag '<function=f>'",
    ),
    "trigger in a trigger": (
        json.dumps({"format": {**CALLS, "triggers": ["<function=", "<f"]}}),
        "is in the trigger",
    ),
    "one end is empty": (
        json.dumps({"format": {**THOUGHT, "end": ["", "a"]}}),
        "an end of a tag is empty",
    ),
    "nested": (deep(20_000), "bytes. Give at most"),
    "deep": (deep(5000), "recursion"),
    "large": (
        '{"format": {"type": "repeat", "min": 0, "max": 9999999, "content": {"type": "or"}}}',
        "`$.format.max`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(name: str, grammars: Grammars) -> None:
    text, problem = REFUSED[name]
    with pytest.raises(InvalidRequestError) as caught:
        grammars.masks(Grammar("structural_tag", text, "response_format"), 1)
    assert caught.value.field == "response_format"
    assert problem in str(caught.value)


def test_an_engine_writes_calls() -> None:
    asked = {**CALLS, "at_least_one": True, "stop_after_first": True}
    whole = {"type": "structural_tag", "format": asked}
    text = json.dumps(whole)
    with grammar_engine() as engine:
        result = engine.generate([5], structural_tag=whole, max_tokens=200, n=4, seed=1).result()
        again = engine.generate([5], structural_tag=text, max_tokens=200, seed=1).result()
        with pytest.raises(InvalidRequestError, match="structural_tag: is a int"):
            engine.generate([5], structural_tag=5)  # type: ignore[call-overload]
    for one in (*result.completions, *again.completions):
        assert matches(asked, one.text)
