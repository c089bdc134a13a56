"""Grammars of answers take what templates write, and nothing that tools do not."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.support.answers import WEATHER, in_pieces, written
from tests.support.grammars import tokens_of
from tests.support.servers import EOS, TOKENIZER
from trtc.protos.answer_formats import ANSWER_FORMATS, AnswerFormat
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.grammar.answer_grammar import (
    AnswerGrammars,
    element_of,
    tag_of,
)
from trtc.runtime.grammar.elements import Element
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.tool_choice import ToolChoice, ToolMode
from trtc.runtime.requests.tools import Tool, ToolUse
from trtc.runtime.text.answer import joined
from trtc.runtime.text.answer_parser import AnswerParser
from trtc.runtime.text.answer_plan import tool_types
from trtc.runtime.text.tokenizer import Tokenizer

TOOLS = (
    Tool("get_weather", parameters=json.dumps({**WEATHER, "required": ["city"]})),
    Tool("now"),
)
ONE = [("get_weather", {"city": "Paris", "days": 2})]
TWO = [("get_weather", {"city": "Paris"}), ("now", {})]
WRONG = [("get_weather", {"days": 2})]
HELD = [name for name, form in ANSWER_FORMATS.items() if form.call is not None]


class _Taker:
    """Says whether texts are of a grammar."""

    def __init__(self, directory: Path = TOKENIZER, ends: tuple[int, ...] = (EOS,)) -> None:
        self.tokenizer = Tokenizer.load(directory)
        self.ends = ends
        self.grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size, ends)

    def takes(self, element: Element, text: str) -> bool:
        masks = self.grammars.masks(tag_of(element, "tools"), 1)
        output: list[int] = []
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if not set(tokens[-1:]) & set(self.ends):
            tokens = (*tokens, self.ends[0])
        for token in tokens:
            mask = masks.allowed(output)
            if not mask[token // 8] >> token % 8 & 1:
                return False
            output.append(token)
        return True

    def drawn(self, element: Element, rng: random.Random) -> str:
        """A text of a grammar, which ends where it may."""
        masks = self.grammars.masks(tag_of(element, "tools"), 1)
        output: list[int] = []
        while True:
            allowed = tokens_of(masks.allowed(output))
            if allowed & set(self.ends):
                return self.tokenizer.decode(output, skip_special=False)
            output.append(rng.choice(sorted(allowed)))
            assert len(output) < 2000


@pytest.fixture(scope="module")
def taker() -> Iterator[_Taker]:
    found = _Taker()
    yield found
    found.grammars.close()


def _use(mode: ToolMode, *, parallel: bool = True) -> ToolUse:
    return ToolUse(TOOLS, ToolChoice(mode), parallel)


def _writer(form: AnswerFormat, taker: _Taker) -> AnswerGrammars:
    return AnswerGrammars(form, taker.tokenizer.special_tokens, taker.ends)


@pytest.mark.parametrize("name", HELD)
def test_required_calls(name: str, taker: _Taker) -> None:
    writer = _writer(ANSWER_FORMATS[name], taker)
    several = writer.of_calls(_use("required"), tight=True)
    one = writer.of_calls(_use("required", parallel=False), tight=True)
    for calls, is_taken, is_taken_alone in (
        (ONE, True, True),
        (TWO, True, False),
        (WRONG, False, False),
        ([], False, False),
        ([("other", {})], False, False),
    ):
        text = written(name, "", "", calls)
        assert taker.takes(several, text) == is_taken
        assert taker.takes(one, text) == is_taken_alone
    assert not taker.takes(several, "Hello. " + written(name, "", "", ONE))


@pytest.mark.parametrize("name", HELD)
def test_calls_after_text(name: str, taker: _Taker) -> None:
    form = ANSWER_FORMATS[name]
    text = "" if form.text_head else "Hello."
    element = _writer(form, taker).of_calls(_use("auto"), tight=True)
    for calls, is_taken in ((ONE, True), (TWO, True), (WRONG, False)):
        assert taker.takes(element, written(name, "", text, calls)) == is_taken
    assert taker.takes(element, written(name, "", "Hello.", []))


TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f", "<|end|>"]},
        "way": {"type": "string", "description": "By", "enum": ["air", "two words", '"']},
        "class": {"$ref": "#/$defs/class"},
        "seat": {"type": ["string", "null"], "maxLength": 2},
        "days": {"type": "integer"},
        "to": {"type": "string", "maxLength": 4},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "stop": {
            "type": "object",
            "properties": {"at": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
    "required": ["unit", "to", "way"],
    "additionalProperties": False,
    "$defs": {"class": {"type": "string", "enum": ["first", "second"]}},
}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("name", HELD)
def test_whatever_is_drawn_is_read_as_calls_whose_arguments_match(name: str, taker: _Taker) -> None:
    """Any tokens that the grammar allows, however the text is cut."""
    rng = random.Random(name)
    schemas = {"book": TRIP, "now": NO_ARGUMENTS}
    tools = tuple(
        Tool(one, parameters=json.dumps(schema), strict=True) for one, schema in schemas.items()
    )
    types = {one: tool_types(schema) for one, schema in schemas.items()}
    for parallel in (False, True):
        use = ToolUse(tools, ToolChoice("required"), parallel)
        element = _writer(ANSWER_FORMATS[name], taker).of_calls(use, tight=True)
        for _ in range(5):
            text = taker.drawn(element, rng)
            said = [
                [(part.kind, part.name, part.text) for part in joined(parts)]
                for parts in (
                    parsed(AnswerParser(ANSWER_FORMATS[name], types), pieces)
                    for pieces in ([text], list(text), in_pieces(text, [7, 1, 3]))
                )
            ]
            assert said[0] == said[1] == said[2]
            assert said[0], text
            assert parallel or len(said[0]) == 1
            for kind, tool, arguments in said[0]:
                assert kind == "call", text
                jsonschema.validate(json.loads(arguments), schemas[tool])


@pytest.mark.parametrize(
    "name",
    [one for one in HELD if ANSWER_FORMATS[one].call.notation == "parameters"],  # type: ignore[union-attr]
)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "pattern"),
        ({"properties": {"a": {"type": ["string", "null"], "minLength": 2}}}, "minLength"),
        ({"properties": {"a": {"type": "string", "enum": ["null", None]}}}, ""),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": {"a": {}}, "required": ["b"]}, "required"),
        ({"properties": {"a": False}}, "properties"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, "$ref"),
        ({"properties": {"a": True, "b": {"type": "string", "const": "x"}}}, ""),
    ],
)
def test_what_arguments_between_marks_cannot_be_held_to_is_named(
    schema: dict[str, Any], keyword: str, name: str, taker: _Taker
) -> None:
    """Of tools that are strict. Others may have any arguments then."""
    says_json = name == "deepseek_v32"
    keyword = "" if says_json and keyword in ("pattern", "minLength") else keyword
    writer = _writer(ANSWER_FORMATS[name], taker)
    tool, strict = (Tool("f", parameters=json.dumps(schema), strict=one) for one in (False, True))
    use = ToolUse((strict,), ToolChoice("required"))
    if keyword:
        with pytest.raises(InvalidRequestError, match=rf"^chat\.tools: has '{re.escape(keyword)}'"):
            writer.of_calls(use, tight=False)
    else:
        writer.of_calls(use, tight=False)
    loose = writer.of_calls(ToolUse((tool,), ToolChoice("required")), tight=False)
    for arguments in ({}, {"a": "x y"}, {"b": [1, "z"], "a": 5}):
        assert taker.takes(loose, written(name, "", "", [("f", arguments)]))


def parsed(parser: AnswerParser, pieces: Sequence[str]) -> list[Any]:
    return [*(part for piece in pieces for part in parser.push(piece)), *parser.flush()]


@pytest.mark.parametrize("name", [one for one in HELD if ANSWER_FORMATS[one].thought is not None])
def test_calls_after_a_thought(name: str, taker: _Taker) -> None:
    form = ANSWER_FORMATS[name]
    assert form.thought is not None
    writer = _writer(form, taker)
    calls = writer.of_calls(_use("required"), tight=True)
    element = writer.after_thought(calls, has_begun=True)
    whole, unthought = written(name, "I think", "", ONE), written(name, "", "", ONE)
    begun = whole.removeprefix(form.thought.begins[0])
    assert begun != whole
    assert taker.takes(element, begun)
    assert not taker.takes(element, unthought)
    optional = writer.after_thought(calls, has_begun=False)
    assert taker.takes(optional, whole)
    assert taker.takes(optional, unthought)
    assert not taker.takes(optional, begun)
    assert not taker.takes(optional, whole + whole)


@pytest.mark.parametrize(
    "name", [name for name, one in ANSWER_FORMATS.items() if one.thought is not None]
)
def test_a_document_after_a_thought(name: str, taker: _Taker) -> None:
    form = ANSWER_FORMATS[name]
    writer = _writer(form, taker)
    grammar = Grammar("json_schema", json.dumps({"enum": [12]}))
    element = writer.after_thought(writer.as_text(element_of(grammar)), has_begun=False)
    for thought in ("", "I think"):
        for text, is_taken in (("12", True), ("13", False)):
            answer = written(name, thought, text, []).removesuffix("<|return|>")
            assert taker.takes(element, answer) == is_taken


def test_loose_grammars_leave_the_schemas_of_tools_that_are_not_strict(taker: _Taker) -> None:
    writer = _writer(ANSWER_FORMATS["hermes"], taker)
    text = written("hermes", "", "", WRONG)
    assert taker.takes(writer.of_calls(_use("required"), tight=False), text)
    strict = tuple(Tool(one.name, parameters=one.parameters, strict=True) for one in TOOLS)
    use = ToolUse(strict, ToolChoice("required"))
    assert not taker.takes(writer.of_calls(use, tight=False), text)


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_marks_that_are_special_tokens(mode: Any, taker: _Taker) -> None:
    hermes = ANSWER_FORMATS["hermes"]
    assert hermes.call is not None
    call = replace(hermes.call, begins=("<|im_start|>",), tails=("<|im_end|>",))
    writer = _writer(replace(hermes, call=call), taker)
    element = writer.of_calls(_use(mode), tight=True)
    text = written("hermes", "", "", ONE)
    text = text.replace("<tool_call>", "<|im_start|>").replace("</tool_call>", "<|im_end|>")
    assert taker.takes(element, text)
    assert not taker.takes(element, text.replace("Paris", "<|im_end|>"))


def _with_marks(directory: Path, marks: Sequence[str], ends: Sequence[str]) -> _Taker:
    """Over a tokenizer that has marks as special tokens, of which some end an answer."""
    fast = FastTokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    fast.add_special_tokens(list(marks))
    fast.save(str(directory / "tokenizer.json"))
    return _Taker(directory, tuple(fast.token_to_id(text) for text in ends))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Taker]:
    names = ("start", "channel", "message", "constrain", "end", "return", "call")
    marks = [f"<|{name}|>" for name in names]
    found = _with_marks(tmp_path_factory.mktemp("harmony"), marks, marks[-2:])
    yield found
    found.grammars.close()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Taker]:
    marks = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<turn|>")
    found = _with_marks(tmp_path_factory.mktemp("gemma"), marks, marks[-1:])
    yield found
    found.grammars.close()


@pytest.mark.parametrize("tight", [True, False])
def test_gemma_calls_by_its_special_tokens(tight: bool, gemma: _Taker) -> None:
    writer = _writer(ANSWER_FORMATS["gemma"], gemma)
    element = writer.after_thought(writer.of_calls(_use("required"), tight=tight), has_begun=False)
    for thought in ("", "I think"):
        for calls in (ONE, TWO):
            assert gemma.takes(element, written("gemma", thought, "", calls))
        assert gemma.takes(element, written("gemma", thought, "", WRONG)) != tight
    auto = writer.of_calls(_use("auto"), tight=tight)
    assert gemma.takes(auto, written("gemma", "", "Hello.", TWO))
    assert gemma.takes(auto, "Hello.")


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_harmony_calls_once_by_its_special_tokens(mode: Any, harmony: _Taker) -> None:
    writer = _writer(ANSWER_FORMATS["harmony"], harmony)
    element = writer.of_calls(_use(mode), tight=True)
    element = writer.after_thought(element, has_begun=False)
    for thought in ("", "I think"):
        assert harmony.takes(element, written("harmony", thought, "", ONE))
        assert not harmony.takes(element, written("harmony", thought, "", WRONG))
        assert not harmony.takes(element, written("harmony", thought, "", TWO))
        is_free = mode == "auto"
        assert harmony.takes(element, written("harmony", thought, "Hello.", [])) == is_free
    assert not harmony.takes(element, "Hello.")
