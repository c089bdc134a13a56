"""Schemas of arguments whose notation is not JSON: Gemma's, as formats of a structural tag.

    {city:<|"|>Paris<|"|>,days:[1,2],at:{hour:3}}

Keys have no quotes, and come in the order of the schema; there is no whitespace. What a schema says
beyond types, enums and sizes cannot be held, and is refused by its keyword.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trtc.runtime.grammar.elements import Element, const, either, optional, sequence

_MAX_DEPTH = 24
"""Of schemas within each other, references included."""
_MAX_SCHEMAS = 512
"""Within one, each as often as it is referred to."""
MAX_ELEMENTS = 4096
"""Of an object: members that may be missing are written several times."""
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    }
)
"""What says nothing of a value by itself."""
_KINDS: Mapping[str, frozenset[str]] = {
    "$ref": frozenset({"$ref"}),
    "anyOf": frozenset({"anyOf"}),
    "const": frozenset({"const", "type"}),
    "enum": frozenset({"enum", "type"}),
}
"""A keyword that says what a value is, and those that may stand beside it."""
_OF_TYPES = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minItems",
        "maxItems",
        "maxLength",
    }
)
_PYTHON: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_KEY = re.compile(r"[^\s{}\[\],:<>|\"]+")
_NUMBERS = {
    "integer": r"-?(0|[1-9][0-9]{0,17})",
    "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?",
}
_ANY = r"""
object: "{" (pair ("," pair)*)? "}"
pair: KEY ":" value
value: text | NUMBER | "true" | "false" | "null" | object | array
array: "[" (value ("," value)*)? "]"
KEY: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/
"""


class Unheld(Exception):
    """A schema asks for what its notation cannot be held to. Args: keyword: of the schema."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


class LiteralSchema:
    """One schema, and all that it refers to."""

    def __init__(self, schema: Mapping[str, Any], quote: Element) -> None:
        """
        Args:
            quote: what stands at both ends of a text: a `const_string` or a `token`.
        """
        self._schema = schema
        self._num_schemas = 0
        self._mark: str | Element = quote.get("value", quote)

    def arguments(self) -> Element:
        """What arguments may be.

        Raises:
            Unheld: they cannot be held.
        """
        return self._of(self._schema, 0)

    def _of(self, schema: Any, depth: int) -> Element:
        if schema is True or schema == {}:
            return self._anything("value")
        self._num_schemas += 1
        if not isinstance(schema, Mapping):
            raise Unheld("properties")
        if depth > _MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            raise Unheld("$ref")
        given = schema.keys() - ANNOTATIONS
        decides = next((one for one in _KINDS if one in given), "type")
        for keyword in schema:
            if keyword in given and keyword not in _KINDS.get(decides, _OF_TYPES):
                raise Unheld(keyword)
        if decides == "$ref":
            return self._of(self._referred(schema["$ref"]), depth + 1)
        if decides == "anyOf":
            return self._any_of(schema["anyOf"], depth)
        if decides in ("const", "enum"):
            listed = [schema["const"]] if decides == "const" else schema["enum"]
            return self._one_of(listed, schema.get("type"))
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            return self._anything("value")
        listed = kinds if isinstance(kinds, list) and kinds else [kinds]
        return either(*(self._of_type(kind, schema, depth) for kind in listed))

    def _any_of(self, schemas: Any, depth: int) -> Element:
        if not schemas or not isinstance(schemas, list):
            raise Unheld("anyOf")
        return either(*(self._of(one, depth + 1) for one in schemas))

    def _of_type(self, kind: Any, schema: Mapping[str, Any], depth: int) -> Element:
        if not isinstance(kind, str):
            raise Unheld("type")
        if kind == "string":
            return self._quoted(
                {"type": "any_text", "max_chars": size_of(schema, "maxLength", None)}
            )
        if kind in _NUMBERS:
            return {"type": "regex", "pattern": _NUMBERS[kind]}
        if kind == "boolean":
            return either(const("true"), const("false"))
        if kind == "null":
            return const("null")
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return self._object(schema, depth)
        raise Unheld("type")

    def _object(self, schema: Mapping[str, Any], depth: int) -> Element:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise Unheld("properties")
        if not isinstance(required, list) or not all(one in properties for one in required):
            raise Unheld("required")
        if isinstance(schema.get("additionalProperties"), Mapping):
            raise Unheld("additionalProperties")
        if not properties and schema.get("additionalProperties") is not False:
            return self._anything("object")
        members = []
        for key, one in properties.items():
            if not _KEY.fullmatch(key):
                raise Unheld("properties")
            value = self._of(one, depth + 1)
            members.append((sequence(const(f"{key}:"), value), key in required))
        element = sequence(const("{"), *_members(members), const("}"))
        if _is_large(element):
            raise Unheld("properties")
        return element

    def _array(self, schema: Mapping[str, Any], depth: int) -> Element:
        item = self._of(schema.get("items", True), depth + 1)
        least, most = size_of(schema, "minItems", 0), size_of(schema, "maxItems", None)
        if most is not None and most < least:
            raise Unheld("maxItems")
        if most == 0:
            return const("[]")
        follows = sequence(const(","), item)
        again = {"min": max(least - 1, 0), "max": -1 if most is None else most - 1}
        more = [] if most == 1 else [{"type": "repeat", **again, "content": follows}]
        items = sequence(item, *more)
        return sequence(const("["), items if least else optional(items), const("]"))

    def _one_of(self, values: Any, kinds: Any) -> Element:
        """Those of the values that are of the types."""
        listed = kinds if isinstance(kinds, list) else [kinds]
        if not isinstance(values, list) or any(isinstance(one, dict | list) for one in values):
            raise Unheld("enum")
        of_types = [one for one in values if kinds is None or any(_is(one, k) for k in listed)]
        if not of_types:
            raise Unheld("enum")
        return either(*map(self._exactly, of_types))

    def _exactly(self, value: Any) -> Element:
        return self._quoted(const(value)) if isinstance(value, str) else const(json.dumps(value))

    def _quoted(self, content: Element) -> Element:
        return {"type": "tag", "begin": self._mark, "content": content, "end": self._mark}

    def _anything(self, rule: str) -> Element:
        """Args: rule: of `_ANY`."""
        if isinstance(self._mark, str):
            mark = json.dumps(self._mark)
            text = f"text: {mark} rest\nrest[lazy]: /(?s:.*)/ {mark}"
        else:
            mark = f"<[{self._mark['token']}]>"
            text = f"text: {mark} REST {mark}\nREST: /(?s:.*)/"
        return {"type": "grammar", "grammar": f"start: {rule}\n{_ANY}{text}"}

    def _referred(self, reference: Any) -> Any:
        found: Any = self._schema
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise Unheld("$ref")
        for part in reference[1:].split("/")[1:]:
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            raise Unheld("$ref")
        return found


def _is(value: object, kind: object) -> bool:
    """Whether a scalar is of a type of JSON."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(kind, str) and kind in _PYTHON and isinstance(value, _PYTHON[kind])


def size_of(schema: Mapping[str, Any], keyword: str, otherwise: Any) -> Any:
    """A number of the schema."""
    found = schema.get(keyword, otherwise)
    if keyword in schema and (type(found) is not int or not 0 <= found <= 1 << 16):
        raise Unheld(keyword)
    return found


def _members(members: Sequence[tuple[Element, bool]]) -> list[Element]:
    """Those of an object, with a comma between two. Args: members: and whether they have to be."""
    choices: list[Element] = []
    for at, (member, is_required) in enumerate(members):
        choices.append(sequence(member, *_after(members[at + 1 :])))
        if is_required:
            return [either(*choices)]
    return [optional(either(*choices))] if choices else []


def _after(members: Sequence[tuple[Element, bool]]) -> list[Element]:
    """Members that follow another one."""
    listed = []
    for member, is_required in members:
        follows = sequence(const(","), member)
        listed.append(follows if is_required else optional(follows))
    return listed


def _is_large(element: Element) -> bool:
    """Whether it has more than MAX_ELEMENTS within it, as it is written."""
    waiting, count = [element], 0
    while waiting:
        count += 1
        if count > MAX_ELEMENTS:
            return True
        one = waiting.pop()
        waiting += one.get("elements", ())
        waiting += [one["content"]] if "content" in one else []
    return False
