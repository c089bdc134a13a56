"""Arguments in Gemma's notation are held to a schema: jsonschema is the oracle."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answers import in_gemma
from tests.support.grammars import TextReader, pyllama_grammars
from tests.support.servers import TOKENIZER
from trtc.protos.answer_formats import quote_of
from trtc.runtime.grammar.answer_grammar import tag_of
from trtc.runtime.grammar.elements import const
from trtc.runtime.grammar.literal_schema import LiteralSchema, Unheld
from trtc.runtime.text.tokenizer import Tokenizer

QUOTE = quote_of("literal")
KEYS = ("a", "b_1", "c-d")
SCALARS: st.SearchStrategy[Any] = st.sampled_from(
    ["", "x", "two words", 'q"\\', "é", "true", 0, -12, 345, 0.5, -2.25, True, False, None]
)
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(
        lambda kind: {"type": kind, "description": "A value"}
    ),
    st.just({"type": ["integer", "null"]}),
    st.just({"type": ["string", "null"], "enum": ["x", 5, None]}),
    st.just({"type": "string", "maxLength": 4}),
    st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr).map(lambda listed: {"enum": listed}),
    SCALARS.map(lambda value: {"const": value}),
    st.just({}),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=3), st.sets(st.sampled_from(KEYS))
    ).map(
        lambda drawn: {
            "type": "object",
            "properties": {key: drawn[0][key] for key in KEYS if key in drawn[0]},
            "required": [key for key in KEYS if key in drawn[0] and key in drawn[1]],
            "additionalProperties": False,
        }
    )


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return st.tuples(inner, sizes, st.booleans()).map(
        lambda drawn: {
            "type": "array",
            "items": drawn[0],
            "minItems": drawn[1][0],
            **({"maxItems": sum(drawn[1])} if drawn[2] else {}),
        }
    )


SCHEMAS = _objects(
    st.recursive(
        LEAVES,
        lambda inner: (
            _objects(inner)
            | _arrays(inner)
            | st.lists(inner, min_size=1, max_size=2).map(lambda listed: {"anyOf": listed})
        ),
        max_leaves=4,
    )
)


def _instances(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly of the schema."""
    of_type: dict[str, st.SearchStrategy[Any]] = {
        "string": st.sampled_from(["", "x", "four", "five!", 'q"\\', "{,:}", "<|"]),
        "integer": st.sampled_from([0, -12, 345]),
        "number": st.sampled_from([0, 0.5, -2.25, 12]),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    if "enum" in schema or "const" in schema:
        return st.sampled_from([*schema.get("enum", [schema.get("const")]), "other"])
    if "anyOf" in schema:
        return st.one_of([_instances(one) for one in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object":
        each = {key: _instances(one) for key, one in schema["properties"].items()}
        drawn = st.fixed_dictionaries({}, optional={**each, "c-d": each.get("c-d", SCALARS)})
        return drawn.map(lambda found: {key: found[key] for key in KEYS if key in found})
    if kind == "array":
        return st.lists(_instances(schema["items"]), max_size=4)
    return SCALARS if not isinstance(kind, str) else of_type[kind]


@pytest.fixture(scope="module")
def reader() -> Iterator[TextReader]:
    with _reading() as found:
        yield found


@contextmanager
def _reading() -> Iterator[TextReader]:
    tokenizer = Tokenizer.load(TOKENIZER)
    with pyllama_grammars() as grammars:
        yield TextReader(grammars, tokenizer)
    tokenizer.close()


def _is_taken(schema: dict[str, Any], text: str, reader: TextReader) -> bool:
    element = LiteralSchema(schema, const(QUOTE)).arguments()
    return reader.reads(tag_of(element, "tools"), text)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), schema=SCHEMAS)
def test_what_is_taken_is_what_the_schema_describes(
    data: st.DataObject, schema: dict[str, Any], reader: TextReader
) -> None:
    instance = data.draw(_instances(schema))
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(instance)
    assert _is_taken(schema, in_gemma(instance), reader) == is_valid


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{a:<|"|>x<|"|>,b:[1,{c:null}],d:{},e:[]}', True),
        ("{}", True),
        ("{a:}", False),
        ("{a:1,}", False),
        ("{a:x}", False),
        ("[1]", False),
    ],
)
def test_any_object(text: str, is_taken: bool, reader: TextReader) -> None:
    assert _is_taken({"type": "object"}, text, reader) == is_taken


def test_references(reader: TextReader) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/one"}},
        "required": ["a"],
        "$defs": {"one": {"enum": ["x", 1]}},
    }
    assert _is_taken(schema, '{a:<|"|>x<|"|>}', reader)
    assert _is_taken(schema, "{a:1}", reader)
    assert not _is_taken(schema, "{a:2}", reader)


DOUBLING = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(20)}
OPTIONAL: dict[str, Any] = {"type": "string"}
for _ in range(6):
    OPTIONAL = {"type": "object", "properties": {f"k{at}": OPTIONAL for at in range(4)}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"pattern": "a", "type": "string"}, "pattern"),
        ({"type": "integer", "minimum": 1}, "minimum"),
        ({"enum": [{"a": 1}]}, "enum"),
        ({"enum": []}, "enum"),
        ({"enum": ["a"], "type": "integer"}, "enum"),
        ({"enum": 5}, "enum"),
        ({"type": "file"}, "type"),
        ({"type": {}}, "type"),
        ({"type": []}, "type"),
        ({"anyOf": []}, "anyOf"),
        ({"anyOf": [{"type": "string"}], "maxLength": 3}, "maxLength"),
        ({"oneOf": [{"type": "string"}]}, "oneOf"),
        ({"properties": []}, "properties"),
        ({"properties": {}, "required": "a"}, "required"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"type": "array", "minItems": "2"}, "minItems"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "additionalProperties"),
        ({"type": "object", "properties": {"a:b": {}}}, "properties"),
        ({"type": "object", "properties": {"a": 5}}, "properties"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required"),
        ({"$ref": "#"}, "$ref"),
        ({"$ref": "http://example.com/x"}, "$ref"),
        ({"$ref": "#/$defs/d0", "$defs": {**DOUBLING, "d20": {}}}, "$ref"),
        (OPTIONAL, "properties"),
    ],
    ids=lambda one: json.dumps(one)[:40],
)
def test_what_cannot_be_held_is_named(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(Unheld) as caught:
        LiteralSchema(schema, const(QUOTE)).arguments()
    assert caught.value.keyword == keyword
