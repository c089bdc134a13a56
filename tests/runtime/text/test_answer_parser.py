"""Answers in every format, cut in every way."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answers import read_in, written, written_call
from trtc.protos.answer_formats import ANSWER_FORMATS

WITH_CALLS = [name for name, form in ANSWER_FORMATS.items() if form.call is not None]
MARKS = sorted({mark for form in ANSWER_FORMATS.values() for mark in form.markers})

CITIES = st.text(st.characters(codec="utf-8", exclude_characters='<>｜[]{}|"\\'), max_size=8)
CALLS: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(
        st.just("get_weather"),
        st.fixed_dictionaries(
            {"city": CITIES.map(str.strip)}, optional={"days": st.integers(0, 99)}
        ),
    ),
    st.tuples(st.just("now"), st.just({})),
)
PLAIN = st.text("abc ,.é中\n", max_size=20).map(str.strip)
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.sampled_from(MARKS).map(lambda mark: mark[:-1]),
        st.text('{}[]":,\\<>|/ \nabnow', max_size=12),
        st.sampled_from(
            ["get_weather", "now", '{"name": "now", "arguments": {}}', '{"city": "x"}']
        ),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", WITH_CALLS)
@settings(max_examples=40)
@given(thought=PLAIN, text=PLAIN, calls=st.lists(CALLS, max_size=3))
def test_what_was_written_is_read(name: str, thought: str, text: str, calls: list[Any]) -> None:
    form = ANSWER_FORMATS[name]
    if form.call is not None and form.call.only_first and calls:
        text = ""
    answer = written(name, thought, text, calls)
    expected: list[Any] = []
    if thought and form.thought is not None:
        expected.append(("reasoning", thought))
    if text:
        expected.append(("text", text))
    assert read_in(name, list(answer)) == [*expected, *calls]


@pytest.mark.parametrize("name", ANSWER_FORMATS)
@settings(max_examples=40)
@given(answer=HOSTILE, cuts=st.lists(st.integers(1, 9), min_size=1), in_thought=st.booleans())
def test_cuts_do_not_matter(name: str, answer: str, cuts: list[int], *, in_thought: bool) -> None:
    in_thought = in_thought and ANSWER_FORMATS[name].thought is not None
    pieces, at, number = [], 0, 0
    while at < len(answer):
        size = cuts[number % len(cuts)]
        pieces.append(answer[at : at + size])
        at, number = at + size, number + 1
    assert read_in(name, pieces, in_thought=in_thought) == read_in(
        name, [answer], in_thought=in_thought
    )


@pytest.mark.parametrize("name", ANSWER_FORMATS)
@settings(max_examples=40)
@given(answer=HOSTILE)
def test_only_marks_and_whitespace_are_lost(name: str, answer: str) -> None:
    said = read_in(name, [answer])
    if any(kind not in ("text", "reasoning") for kind, _ in said):
        return  # a call's marks and its name
    everything = "".join(text for _, text in said)
    form = ANSWER_FORMATS[name]
    marks = [*form.dropped]
    if form.thought is not None:
        marks += [*form.thought.begins, form.thought.end]
    if form.call is not None and form.call.separator:
        marks.append(form.call.separator)
    unmarked = re.sub("|".join(map(re.escape, marks)), "", answer) if marks else answer
    assert _is_within("".join(unmarked.split()), everything)
    assert _is_within(everything, answer)


def _is_within(some: str, whole: str) -> bool:
    """Whether all characters of a text come in another one, in their order."""
    left = iter(whole)
    return all(character in left for character in some)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_cut_call_is_text(name: str) -> None:
    call = written_call(name, "get_weather", {"city": "Paris", "days": 2})
    for size in range(1, len(call) - len("</function>\n</tool_call>\n</parameter>")):
        cut = call[:size]
        text = "".join(text for kind, text in read_in(name, [cut]) if kind == "text")
        assert text.strip() == cut.strip()


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_of_an_unknown_tool_is_text(name: str) -> None:
    call = written_call(name, "rm_rf", {"city": "Paris"})
    assert all(kind in ("text", "reasoning") for kind, _ in read_in(name, [call]))


@pytest.mark.parametrize("name", ANSWER_FORMATS)
def test_no_mark_begins_another(name: str) -> None:
    form = ANSWER_FORMATS[name]
    marks = [*form.dropped]
    if form.thought is not None:
        marks += form.thought.begins
    if form.call is not None:
        marks += form.call.begins
    for one in marks:
        assert not [other for other in marks if other != one and other.startswith(one)]


def test_a_string_may_hold_the_end_of_a_call() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert read_in("hermes", [text]) == [("now", {"a": "</tool_call>"})]


def test_a_thought_that_the_prompt_began() -> None:
    assert read_in("hermes", ["hm\n</thi", "nk>\n\nok"], in_thought=True) == [
        ("reasoning", "hm"),
        ("text", "ok"),
    ]


def test_marks_in_the_middle_of_a_text_are_no_thought() -> None:
    text = "Write <think> and </think> around it."
    assert read_in("hermes", [text]) == [("text", text)]


def test_a_parameter_has_the_type_of_its_schema() -> None:
    call = written_call("qwen3_coder", "get_weather", {"city": "12", "days": 3})
    assert read_in("qwen3_coder", [call]) == [("get_weather", {"city": "12", "days": 3})]
