"""Grammars that would take the server's time, memory or process fail alone, by their name."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.grammars import pyllama_grammars
from trtc.protos.errors import InvalidRequestError, UnavailableError
from trtc.runtime.grammar.grammars import MAX_KEPT, Grammars
from trtc.runtime.grammar.trial import GrammarTrials, TrialLimits
from trtc.runtime.requests.grammar import Grammar, choice, json_schema


def doubling(keyword: str, levels: int) -> dict[str, Any]:
    """Each definition names the next one twice."""
    refs = [{"$ref": f"#/$defs/d{at + 1}"} for at in range(levels)]
    defs = {f"d{at}": {keyword: [ref, ref]} for at, ref in enumerate(refs)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{levels}": {"type": "integer"}}}


def nested(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


REFUSED: dict[str, tuple[Grammar, str]] = {
    "too large": (choice(["x" * 300_000]), "bytes. Give at most"),
    "nested": (Grammar("json_schema", nested(5000)), "recursion"),
    "long chain": (
        Grammar(
            "lark",
            "\n".join(f"a{at}: a{at + 1} | X" for at in range(9000)).replace("a0", "start", 1)
            + '\na9000: "x"\nX: "x"',
        ),
        "is nested too deeply",
    ),
    "brackets": (Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000), "cannot be compiled"),
    "intersections": (
        json_schema(
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"properties": {f"p{at}": {"type": one}}} for one in ("null", "string")
                        ]
                    }
                    for at in range(24)
                ]
            }
        ),
        "cannot be compiled",
    ),
    "no schema": (Grammar("json_schema", "[1]"), "a schema is a JSON object"),
    "no json": (Grammar("json_schema", "{"), "cannot be compiled"),
    "lenient": (
        json_schema({"x-guidance": {"lenient": True}, "not": {}}),
        'Unimplemented keys: ["not"]',
    ),
    **{
        keyword: (json_schema({keyword: value}), keyword)
        for keyword, value in {
            "not": {},
            "uniqueItems": True,
            "contains": {},
            "if": {},
            "dependentRequired": {"a": ["b"]},
            "propertyNames": {"maxLength": 3},
            "unevaluatedProperties": False,
        }.items()
    },
    "remote": (json_schema({"$ref": "http://127.0.0.1:1/x"}), "127.0.0.1"),
    "format": (json_schema({"type": "string", "format": "regex-ish"}), "Unknown format: regex-ish"),
    "nothing": (json_schema({"type": "string", "minLength": 2, "maxLength": 1}), "Unsatisfiable"),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with pyllama_grammars() as opened:
        yield opened


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(name: str, grammars: Grammars) -> None:
    grammar, problem = REFUSED[name]
    with pytest.raises(InvalidRequestError) as caught:
        source = grammars.masks(grammar, 1)
        source.allowed([])
    assert caught.value.field == f"grammar.{grammar.kind}"
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 600
    assert grammars.masks(Grammar("regex", "still here"), 1).allowed([])


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema(doubling("allOf", 40)),
        json_schema(doubling("anyOf", 40)),
        json_schema({"type": "string", "pattern": "^(.*a.{40})(.*b.{40})$"}),
        json_schema({"type": "array", "minItems": 10_000_000}),
        Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
        Grammar("regex", "(a|aa)+" * 20),
        Grammar("lark", 'start: start start | "a"'),
    ],
    ids=lambda one: one.text[:40],
)
def test_what_is_small_only_in_writing_takes_little(grammar: Grammar, grammars: Grammars) -> None:
    """It is held, or refused; the memory and time of either are the limited process's."""
    source = grammars.masks(grammar, 1)
    output: list[int] = []
    for token in (68, 68, 68):  # a
        mask = source.allowed(output)
        if not mask[token // 8] >> token % 8 & 1:
            break
        output.append(token)


def test_a_compiler_out_of_time_or_memory_is_replaced() -> None:
    slow = json_schema({"enum": [{f"k{at}": at} for at in range(12_000)]})
    hurried = GrammarTrials(TrialLimits(cpu_seconds=0.05))
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.05 s of CPU time"):
        hurried.run(slow)
    assert hurried.run(Grammar("regex", "a"))
    starved = GrammarTrials(TrialLimits(wall_seconds=0.001))
    with pytest.raises(UnavailableError, match="this machine is too busy"):
        starved.run(slow)
    narrow = GrammarTrials(TrialLimits(memory_bytes=8 << 20))
    with pytest.raises(InvalidRequestError, match="json_schema"):
        narrow.run(slow)
    assert narrow.run(Grammar("regex", "a"))
    for trials in (hurried, starved, narrow):
        trials.close()
        with pytest.raises(UnavailableError):
            trials.run(Grammar("regex", "a"))


def test_compiled_grammars_are_bounded() -> None:
    with pyllama_grammars() as grammars:
        listed = [Grammar("regex", f"a{{{at}}}") for at in range(1, MAX_KEPT + 4)]
        for one in listed:
            grammars.masks(one, 1)
        kept = [grammars.is_kept(one) for one in listed]
        assert kept == [False] * 3 + [True] * MAX_KEPT


def test_schemas_keep_the_order_of_their_properties() -> None:
    text = json.dumps({"properties": {"z": {}, "a": {}}})
    assert json_schema(json.loads(text)).text == text
