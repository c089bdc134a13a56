"""Reads one call of a tool, character by character, by the data of its format.

    begin | whitespace, head, name | arguments | tails

A reader is a generator that is sent a character, or "" at the end of the answer. It returns the
calls, or raises Malformed once the characters cannot be a call any more. Each character is looked
at a bounded number of times.
"""

import json
import re
from collections.abc import Collection, Generator, Mapping
from typing import Any, NamedTuple

import msgspec

from trtc.protos.answer_formats import CallFormat, ParameterFormat, quote_of

MAX_CALL_CHARACTERS = 1 << 20
"""Of one call: a longer one is text."""
_SPACES = frozenset(" \t\r\n")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_PIECES = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|([{}\[\],:])|([^{}\[\],:]+?)(?=[{}\[\],:]|<\|"\|>|$)', re.S
)


class ReadCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


class Malformed(Exception):
    """The characters are no call. Args: unread: of them, those that may begin something else."""

    def __init__(self, unread: str) -> None:
        super().__init__(unread)
        self.unread = unread


Reading = Generator[None, str, tuple[ReadCall, ...]]
_Chars = Generator[None, str, str]


class ToolTypes(NamedTuple):
    """What is known of a tool's arguments."""

    is_text: Mapping[str, bool]
    """Name -> whether the schema wants a text there; others are unknown."""
    nullable: Collection[str] = ()


class CallReader:
    """Of one call."""

    def __init__(self, form: CallFormat, tools: Mapping[str, ToolTypes]) -> None:
        """
        Args:
            tools: those that may be called, by name; a call of another is malformed.
        """
        self._form = form
        self._tools = tools
        self._back = ""
        """A character that was read and is read again."""
        self._at_end = False
        self._passed_tail = False
        """Whether the end of the arguments was the first tail."""

    def read(self) -> Reading:
        """The call after its begin."""
        notation = self._form.notation
        if notation == "object":
            calls = yield from self._object()
        elif notation == "objects":
            calls = yield from self._objects()
        else:
            calls = yield from self._named(notation)
        yield from self._tails()
        for call in calls:
            if call.name not in self._tools:
                raise Malformed(self._back)
        return calls

    # What stands between begin and tails

    def _object(self) -> Reading:
        text = yield from self._braced("{}")
        return (self._of_object(_decoded(text, self._back), self._back),)

    def _objects(self) -> Reading:
        first = yield from self._after_spaces()
        self._back = first
        if first == "[":
            text = yield from self._braced("[]")
            try:
                values = msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
            except (msgspec.DecodeError, RecursionError, UnicodeError):
                raise Malformed("") from None
            if not values:
                raise Malformed("")
            return tuple(self._of_object(one, "") for one in values)
        if first == "{" or not self._form.header_end:
            return (yield from self._object())
        return (yield from self._named("named"))

    def _named(self, notation: str) -> Reading:
        form = self._form
        if form.head:
            yield from self._literal(form.head)
        name = yield from self._name()
        if form.header_end:
            yield from self._until(form.header_end)
        if form.name_end:
            yield from self._literal(form.name_end.strip())
        if notation == "named":
            arguments = yield from self._braced("{}")
            _check_object(arguments, self._back)
        elif notation == "literal":
            arguments = _from_literal((yield from self._braced("{}")))
        else:
            assert form.parameter is not None
            arguments = yield from self._parameters(form.parameter, name)
        return (ReadCall(name, arguments),)

    def _of_object(self, value: dict[str, msgspec.Raw], unread: str) -> ReadCall:
        keys = (self._form.arguments_key, "arguments", "parameters")
        try:
            name = msgspec.json.decode(value["name"], type=str)
        except (KeyError, msgspec.DecodeError, UnicodeError):
            raise Malformed(unread) from None
        arguments = next((bytes(value[key]).decode() for key in keys if key in value), "{}")
        _check_object(arguments, unread)
        return ReadCall(name, arguments)

    def _name(self) -> _Chars:
        character = yield from self._after_spaces()
        name: list[str] = []
        while character in _NAME and len(name) <= 256:
            name.append(character)
            character = yield from self._next()
        if self._form.numbered and character == ":":
            character = yield from self._next()
            while "0" <= character <= "9":
                character = yield from self._next()
        self._back = character
        found, prefix = "".join(name), self._form.name_prefix
        if prefix and found not in self._tools:
            found = found.removeprefix(prefix)
        if found not in self._tools:
            raise Malformed(character)
        return found

    def _parameters(self, form: ParameterFormat, name: str) -> _Chars:
        types, arguments = self._tools[name], dict[str, Any]()
        tail = self._form.tails[0]
        while True:
            begins = yield from self._either(form.begin, tail)
            if begins != form.begin:
                break
            key = (yield from self._until(form.key_end)).strip()
            kind = types.is_text.get(key)
            if form.value_begins:
                marks = dict(form.value_begins)
                mark = yield from self._either(*marks)
                kind = kind if marks[mark] is None else marks[mark]
            value = yield from self._until(form.end)
            arguments[key] = _value(_unframed(value), kind, nullable=key in types.nullable)
        self._passed_tail = True
        return msgspec.json.encode(arguments).decode()

    def _tails(self) -> Generator[None, str, None]:
        for at, tail in enumerate(self._form.tails):
            if at == 0 and self._passed_tail:
                continue
            yield from self._literal(tail, may_end=True)

    # Characters

    def _next(self) -> _Chars:
        if self._back:
            character, self._back = self._back, ""
            return character
        if self._at_end:
            return ""
        character = yield
        self._at_end = not character
        return character

    def _after_spaces(self) -> _Chars:
        character = yield from self._next()
        while character in _SPACES and character:
            character = yield from self._next()
        return character

    def _literal(self, text: str, *, may_end: bool = False) -> Generator[None, str, None]:
        """Whitespace, and a text. Args: may_end: the answer may end before it, or within it."""
        seen = ""
        for expected in text:
            character = yield from (self._next() if seen else self._after_spaces())
            if not character and may_end:
                return
            if character != expected:
                raise Malformed(seen + character)
            seen += character

    def _either(self, *texts: str) -> _Chars:
        """Whitespace, and one of several texts of which none begins another."""
        seen = yield from self._after_spaces()
        while seen not in texts:
            if not seen or not any(text.startswith(seen) for text in texts):
                raise Malformed(seen)
            character = yield from self._next()
            if not character:
                raise Malformed("")
            seen += character
        return seen

    def _until(self, end: str) -> _Chars:
        """What stands before a text, which is read as well."""
        seen: list[str] = []
        tail = ""
        while tail != end:
            character = yield from self._next()
            if not character:
                raise Malformed("")
            seen.append(character)
            tail = (tail + character)[-len(end) :]
        return "".join(seen)[: -len(end)]

    def _braced(self, pair: str) -> _Chars:
        """Whitespace, and all from an opening bracket to the one that closes it."""
        quote = quote_of(self._form.notation)
        character = yield from self._after_spaces()
        if character != pair[0]:
            raise Malformed(character)
        seen, depth, tail = [character], 1, ""
        in_text = is_escaped = False
        while depth:
            character = yield from self._next()
            if not character:
                raise Malformed("")
            seen.append(character)
            tail = (tail + character)[-len(quote) :]
            if is_escaped:
                is_escaped = False
            elif tail == quote:
                in_text, tail = not in_text, ""
            elif in_text:
                is_escaped = character == "\\" and quote == '"'
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
        return "".join(seen)


def _decoded(text: str, unread: str) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise Malformed(unread) from None


def _check_object(text: str, unread: str) -> None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise Malformed(unread) from None
    if not isinstance(value, dict):
        raise Malformed(unread)


def _unframed(value: str) -> str:
    """Without the line breaks that the template puts around a value."""
    return value.removeprefix("\n").removesuffix("\n")


def _value(text: str, is_text: bool | None, *, nullable: bool) -> Any:
    """A value: a text where the schema says so, otherwise JSON if it is some."""
    if is_text and not (nullable and text == "null"):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text


def _from_literal(text: str) -> str:
    """The JSON of an object in Gemma's notation."""
    written, at = list[str](), 0
    for match in _PIECES.finditer(text):
        if match.start() != at:
            raise Malformed("")
        at = match.end()
        quoted, mark, bare = match.groups()
        if mark:
            written.append(mark)
        elif bare is None:
            written.append(json.dumps(quoted, ensure_ascii=False))
        elif bare.strip():
            is_key = text[at : at + 1] == ":"
            written.append(json.dumps(bare.strip()) if is_key else _bare(bare.strip()))
    found = "".join(written)
    if at != len(text):
        raise Malformed("")
    _check_object(found, "")
    return found


def _bare(text: str) -> str:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return json.dumps(text, ensure_ascii=False)
    return text
