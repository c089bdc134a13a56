"""Answers in every format, cut in every way."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answers import in_pieces, parser_of, read_in, written, written_call
from trtc.protos.answer_formats import ANSWER_FORMATS
from trtc.runtime.text.answer import joined
from trtc.runtime.text.answer_parser import AnswerParser
from trtc.runtime.text.answer_plan import tool_types

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
    assert read_in(name, in_pieces(answer, cuts), in_thought=in_thought) == read_in(
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
def test_a_cut_call_is_text_until_its_arguments_have_begun(name: str) -> None:
    whole = json.dumps({"city": "Paris", "days": 2})
    call = written_call(name, "get_weather", json.loads(whole))
    seen = ""
    for size in range(1, len(call) + 1):
        kind, said = read_in(name, [call[:size]])[0]
        if kind == "text" and not seen:
            assert said.strip() == call[:size].strip()
            continue
        assert kind == "get_weather"
        text = said if isinstance(said, str) else json.dumps(said)
        assert whole.replace(" ", "").startswith(text.replace(" ", ""))
        assert len(text) >= len(seen)
        seen = text
    assert json.loads(seen) == json.loads(whole)


ESCAPES = st.sampled_from(
    ['\\"', "\\\\", "\\n", "\\/", "\\u00e9", "\\ud83d\\ude00", "a", "é", "😀", "}", "<", "|"]
)
TEXTS = st.lists(ESCAPES, max_size=6).map(lambda listed: '"' + "".join(listed) + '"')
VALUES = st.recursive(
    TEXTS | st.sampled_from(["true", "null", "-1.5e+10", "0", "42"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda listed: "[" + ", ".join(listed) + " ]")
        | st.lists(st.tuples(TEXTS, inner), max_size=3).map(
            lambda listed: "{ " + ",".join(f"{key} : {one}" for key, one in listed) + "}"
        )
    ),
    max_leaves=6,
)
STRING = re.compile(r'("(?:\\.|[^"\\])*")')
CHARACTER = re.compile(r"\\ud83d\\ude00|\\u[0-9a-f]{4}|\\.|.", re.S)
ATOM = re.compile(r"[-+.\w]+|.", re.S)


def _borders(document: str) -> set[int]:
    """Where the text of a document may be cut: not within an escape, a number or a word."""
    borders, at = set(), 0
    for number, run in enumerate(STRING.split(document)):
        for match in (CHARACTER if number % 2 else ATOM).finditer(run):
            at += len(match.group())
            borders.add(at)
    return borders


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "kimi_k2", "phi"])
@settings(max_examples=60)
@given(
    values=st.lists(VALUES, min_size=1, max_size=3), cuts=st.lists(st.integers(1, 5), min_size=1)
)
def test_pieces_of_json_are_its_own_text(name: str, values: list[str], cuts: list[int]) -> None:
    arguments = '{"k":' + ',"k":'.join(values) + "}"
    answer = written_call(name, "now", {}).replace("{}", arguments)
    parser = parser_of(name)
    pieces = [part for piece in in_pieces(answer, cuts) for part in parser.push(piece)]
    assert [part.id != "" for part in pieces] == [part.name != "" for part in pieces]
    assert [part.name for part in pieces] == ["now"] + [""] * (len(pieces) - 1)
    assert {part.index for part in pieces} == {0}
    assert "".join(part.text for part in pieces) == arguments
    borders = _borders(arguments)
    at = 0
    for part in pieces:
        at += len(part.text)
        assert at in borders
    assert not parser.flush()


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_long_text_comes_while_it_is_written(name: str) -> None:
    city = 'a "b" \\ c\n' * 50 if name != "gemma" else "a b\n" * 50
    call = written_call(name, "get_weather", {"city": city})
    parser = parser_of(name)
    counts = [sum(len(part.text) for part in parser.push(one)) for one in call]
    assert max(counts) < 20
    assert sum(counts) > len(city)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_arguments_that_are_no_json_come_as_they_are(name: str) -> None:
    form = ANSWER_FORMATS[name].call
    assert form is not None
    if form.notation in ("parameters", "literal"):
        return
    call = written_call(name, "now", {}).replace("{}", '{"a": Paris, "b": [1 2]}')
    assert read_in(name, [call, "\nBye."])[0] == ("now", '{"a": Paris, "b": [1 2]}')


@pytest.mark.parametrize("name", ["hermes", "phi", "llama3_json"])
def test_arguments_before_the_name_wait_for_it(name: str) -> None:
    call = written_call(name, "now", {})
    key = "parameters" if name == "llama3_json" else "arguments"
    turned = call.replace(f'"name": "now", "{key}": {{}}', f'"{key}": {{"a": 1}}, "name": "now"')
    assert turned != call
    assert read_in(name, [turned]) == [("now", {"a": 1})]


@pytest.mark.parametrize(
    ("written", "read"), [("null", None), ("nul", "nul"), ("nullable", "nullable")]
)
def test_a_text_that_may_be_null(written: str, read: str | None) -> None:
    types = {"f": tool_types({"properties": {"a": {"type": ["string", "null"]}}})}
    parser = AnswerParser(ANSWER_FORMATS["glm47"], types)
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{written}</arg_value></tool_call>"
    parts = joined([part for one in text for part in parser.push(one)])
    assert [json.loads(part.text) for part in parts] == [{"a": read}]


def test_a_call_ends_where_its_marks_are_missing() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}'
    assert read_in("hermes", [call + call + " Bye."]) == [
        ("now", {}),
        ("now", {}),
        ("text", "Bye."),
    ]


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
