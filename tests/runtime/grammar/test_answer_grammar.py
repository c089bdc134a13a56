"""Grammars of answers take what templates write, and nothing that tools do not."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.support.answers import WEATHER, written
from tests.support.servers import EOS, TOKENIZER
from trtc.protos.answer_formats import ANSWER_FORMATS, AnswerFormat
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
