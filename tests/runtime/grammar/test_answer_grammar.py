"""Grammars of answers take what templates write, and nothing that tools do not."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.answers import WEATHER, written
from tests.support.servers import EOS, TOKENIZER
from trtc.protos.answer_formats import ANSWER_FORMATS, AnswerFormat
from trtc.runtime.grammar.answer_grammar import (
    AnswerGrammars,
    Element,
    holds_calls,
    holds_text_before,
    tag_of,
)
from trtc.runtime.grammar.grammars import Grammars
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
HELD = [name for name, form in ANSWER_FORMATS.items() if holds_calls(form)]


class _Taker:
    """Says whether texts are of a grammar."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.load(TOKENIZER)
        self.grammars = Grammars(self.tokenizer, 4096, (EOS,))

    def takes(self, element: Element, text: str) -> bool:
        masks = self.grammars.masks(tag_of(element, "tools"), 1)
        output: list[int] = []
        for token in (*self.tokenizer.encode(text, add_special_tokens=False), EOS):
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
    return AnswerGrammars(form, taker.tokenizer.special_tokens)


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


@pytest.mark.parametrize("name", [one for one in HELD if holds_text_before(ANSWER_FORMATS[one])])
def test_calls_after_text(name: str, taker: _Taker) -> None:
    element = _writer(ANSWER_FORMATS[name], taker).of_calls(_use("auto"), tight=True)
    for calls, is_taken in ((ONE, True), (TWO, True), ([], True), (WRONG, False)):
        assert taker.takes(element, written(name, "", "Hello.", calls)) == is_taken


@pytest.mark.parametrize("name", [one for one in HELD if ANSWER_FORMATS[one].thought is not None])
def test_calls_after_a_thought(name: str, taker: _Taker) -> None:
    form = ANSWER_FORMATS[name]
    assert form.thought is not None
    writer = _writer(form, taker)
    element = writer.after_thought(writer.of_calls(_use("required"), tight=True))
    thought = f"I think {form.thought.end}\n\n"
    assert taker.takes(element, thought + written(name, "", "", ONE))
    assert not taker.takes(element, written(name, "", "", ONE))


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
