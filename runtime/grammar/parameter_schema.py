"""Schemas of arguments of which each stands between marks of its own, texts without quotes.

    <parameter=city>Paris</parameter><parameter=days>[1, 2]</parameter>

A value that the reader of calls takes as a text (`tool_types`) is held to a list of texts or to a
largest length. What a schema says of it beyond that, or of all arguments together, cannot be held,
and is refused by its keyword. Other values are JSON, and held to their whole schema.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trtc.protos.answer_formats import ParameterFormat
from trtc.runtime.grammar.literal_schema import ANNOTATIONS, Unheld, size_of
from trtc.runtime.text.answer_plan import tool_types

_OF_ALL = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_OF_TEXT = ANNOTATIONS | {"type", "enum", "const", "maxLength"}


class Argument(NamedTuple):
    """One argument of a tool, and what its value may be."""

    key: str
    is_required: bool
    schema: Any = None
    """Of a value that is JSON; None: it is a text."""
    texts: Sequence[str] | None = None
    """Those that it may be; None: any."""
    max_chars: int | None = None


def arguments_of(
    schema: Mapping[str, Any], form: ParameterFormat, *, is_framed: bool
) -> list[Argument] | None:
    """The arguments of a tool, in the order of its schema; None: any that there may be.

    Args:
        is_framed: whether line breaks that are no part of it stand around a value.

    Raises:
        Unheld: they cannot be held to the schema.
    """
    properties = _properties(schema)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(one in properties for one in required):
        raise Unheld("required")
    if not properties and schema.get("additionalProperties") is not False:
        return None
    texts = tool_types(schema)
    defined = {one: schema[one] for one in ("$defs", "definitions") if one in schema}
    can_say_json = any(is_text is False for _, is_text in form.value_begins)
    found = []
    for key, one in properties.items():
        if form.key_end in key or key != key.strip():
            raise Unheld("properties")
        argument = Argument(key, key in required)
        if texts.is_text.get(key):
            try:
                nullable = key in texts.nullable
                found.append(_text(argument, one, form.end, nullable=nullable, is_framed=is_framed))
                continue
            except Unheld:
                if not can_say_json:
                    raise
        found.append(argument._replace(schema=_json(one, defined)))
    return found


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    for keyword in schema:
        if keyword not in _OF_ALL:
            raise Unheld(keyword)
    if schema.get("type", "object") != "object":
        raise Unheld("type")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise Unheld("properties")
    return properties


def _json(schema: Any, defined: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a value, with what it may refer to."""
    own = {} if schema is True else schema
    if not isinstance(own, Mapping):
        raise Unheld("properties")
    return {**own, **defined}


def _text(
    argument: Argument, schema: Mapping[str, Any], end: str, *, nullable: bool, is_framed: bool
) -> Argument:
    for keyword in schema:
        if keyword not in _OF_TEXT:
            raise Unheld(keyword)
    if "enum" not in schema and "const" not in schema:
        return argument._replace(max_chars=size_of(schema, "maxLength", None))
    keyword = "const" if "const" in schema else "enum"
    listed = [schema["const"]] if keyword == "const" else schema["enum"]
    if not isinstance(listed, list) or {"enum", "const", "maxLength"} & schema.keys() != {keyword}:
        raise Unheld(keyword)
    texts = [one for one in listed if isinstance(one, str)]
    # The reader would take these for others.
    is_lost = [
        end in one or (nullable and one == "null") or (not is_framed and one != one.strip("\n"))
        for one in texts
    ]
    texts += ["null"] if nullable and None in listed else []
    if not texts or any(is_lost):
        raise Unheld(keyword)
    return argument._replace(texts=texts)
