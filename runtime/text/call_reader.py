"""Reads the calls that follow a mark, character by character, by the data of their format.

    begin | whitespace, head, name | arguments | tails

A reader is a generator that is sent a character, or "" at the end of the answer. A call begins once
its name and the beginning of its arguments are known, and grows by deltas of JSON text. Until then
characters that cannot be a call raise Malformed, and after it those that cannot belong to it. Each
character is looked at a bounded number of times.
"""

import json
import re
from collections.abc import Collection, Generator, Mapping
from typing import Literal, NamedTuple

import msgspec

from trtc.protos.answer_formats import CallFormat, ParameterFormat
from trtc.runtime.text.argument_deltas import (
    ArgumentDeltas,
    JsonDeltas,
    deltas_of,
    escaped,
    json_or_text,
    split_held,
    stops_of,
)

MAX_CALL_CHARACTERS = 1 << 20
"""Held back of one call: one that holds back more is text."""
_SPACES = frozenset(" \t\r\n")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class CallEvent(NamedTuple):
    """What has become known of a call."""

    kind: Literal["begins", "grows", "ends"]
    text: str = ""
    """The tool's name; a delta of the arguments."""


class Malformed(Exception):
    """The characters are no call. Args: unread: of them, those that may begin something else."""

    def __init__(self, unread: str) -> None:
        super().__init__(unread)
        self.unread = unread


class _Cut(Exception):
    """The answer ended within a call."""


Reading = Generator[None, str, None]
_Chars = Generator[None, str, str]


class ToolTypes(NamedTuple):
    """What is known of a tool's arguments."""

    is_text: Mapping[str, bool]
    """Name -> whether the schema wants a text there; others are unknown."""
    nullable: Collection[str] = ()


class CallReader:
    """Of the calls after one begin: one, or a list."""

    def __init__(self, form: CallFormat, tools: Mapping[str, ToolTypes]) -> None:
        """
        Args:
            tools: those that may be called, by name; a call of another is malformed.
        """
        self._form = form
        self._tools = tools
        self._events: list[CallEvent] = []
        self._has_begun = False
        """The call that is being read."""
        self._back = ""
        """A character that was read and is read again."""
        self._deltas: ArgumentDeltas | None = None
        """Reads the arguments."""
        self._stops: re.Pattern[str] | None = None
        """Ends a run of characters of a text between marks of its own."""
        self._at_end = False
        self._passed_tail = False
        """Whether the end of the arguments was the first tail."""

    def take(self) -> list[CallEvent]:
        """The events since it was last asked."""
        events, self._events = self._events, []
        return events

    def run(self, text: str, at: int) -> int:
        """How many characters of a text may be sent at once: one, but for runs within texts."""
        stops = self._stops if self._deltas is None else self._deltas.stops
        if stops is None:
            return 1
        found = stops.search(text, at)
        return max(1, (len(text) if found is None else found.start()) - at)

    def read(self) -> Reading:
        """The calls after their begin."""
        notation = self._form.notation
        try:
            if notation == "object":
                yield from self._object()
            elif notation == "objects":
                yield from self._objects()
            else:
                yield from self._named()
            yield from self._tails()
        except _Cut:
            self._end()

    # What stands between begin and tails

    def _objects(self) -> Reading:
        first = yield from self._after_spaces()
        if first == "[":
            mark = ","
            while mark != "]":
                if mark != ",":
                    raise Malformed(mark)
                yield from self._object()
                mark = yield from self._after_spaces()
            return
        self._back = first
        if first == "{" or not self._form.header_end:
            yield from self._object()
        else:
            yield from self._named()

    def _object(self) -> Reading:
        """{"name": NAME, "arguments": {...}}. Arguments before the name wait for it."""
        keys = (self._form.arguments_key, "arguments", "parameters")
        name, early = "", ""
        yield from self._mark("{")
        mark = ","
        while mark != "}":
            if mark != ",":
                raise Malformed(mark)
            yield from self._mark('"')
            key = yield from self._string()
            yield from self._literal(":")
            if key == "name" and not name:
                yield from self._mark('"')
                name = yield from self._string()
                self._check_known(name, "")
            elif key in keys and name and not self._has_begun and not early:
                yield from self._arguments(name)
            else:
                value = yield from self._value()
                early = early or (value if key in keys else "")
            mark = yield from self._after_spaces()
        if not self._has_begun:
            self._check_known(name, "")
            self._grow(name, _checked(early or "{}"))
        self._end()

    def _named(self) -> Reading:
        form = self._form
        if form.head:
            yield from self._literal(form.head)
        name = yield from self._name()
        if form.header_end:
            yield from self._until(form.header_end)
        if form.name_end:
            yield from self._literal(form.name_end.strip())
        if form.parameter is not None:
            yield from self._parameters(form.parameter, name)
        else:
            yield from self._arguments(name)
        self._end()

    def _name(self) -> _Chars:
        character = yield from self._after_spaces()
        name: list[str] = []
        while character in _NAME and character and len(name) <= 256:
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
        self._check_known(found, character)
        return found

    def _check_known(self, name: str, unread: str) -> None:
        if name not in self._tools:
            raise Malformed(unread)

    # Arguments

    def _arguments(self, name: str) -> Reading:
        """An object in the notation's own syntax. It has begun with its first key."""
        deltas = deltas_of(self._form.notation)
        first = yield from self._after_spaces()
        if first != "{":
            raise Malformed(first)
        held = deltas.push(first)
        character = yield from self._after_spaces()
        if character not in ('"', "}") and self._form.notation != "literal":
            raise Malformed(character)
        self._back = character
        self._deltas = deltas
        while not deltas.is_whole:
            character = yield from self._next()
            if not character:
                self._grow("", deltas.flush())
                raise self._ended()
            held += deltas.push(character)
            if held:
                self._grow(name, held)
                held = ""
        self._deltas = None

    def _parameters(self, form: ParameterFormat, name: str) -> Reading:
        """Arguments between marks of their own."""
        types, tail = self._tools[name], self._form.tails[0]
        before = "{"
        while (yield from self._either(form.begin, tail)) == form.begin:
            key = (yield from self._until(form.key_end)).strip()
            kind = types.is_text.get(key)
            if form.value_begins:
                marks = dict(form.value_begins)
                mark = yield from self._either(*marks)
                kind = kind if marks[mark] is None else marks[mark]
            self._grow(name, f"{before}{json.dumps(key, ensure_ascii=False)}:")
            before = ","
            if kind:
                yield from self._text_value(form.end, nullable=key in types.nullable)
            else:
                self._grow(name, json_or_text(_unframed((yield from self._until(form.end)))))
        self._grow(name, "{}" if before == "{" else "}")
        self._passed_tail = True

    def _text_value(self, end: str, *, nullable: bool) -> Reading:
        """A text up to its end. Without the line breaks that the template puts around it."""
        first = yield from self._needed()
        self._back = "" if first == "\n" else first
        ends = (end, f"\n{end}")
        stops = stops_of(ends)
        held, text, is_open = "", "", False
        while True:
            self._stops = None if held or not is_open else stops
            held += yield from self._needed()
            if held in ends:
                break
            is_run = self._stops is not None and not stops.match(held)
            certain, held = (held, "") if is_run else split_held(held, ends)
            text += certain
            if not text or (nullable and not is_open and "null".startswith(text)):
                continue
            self._grow("", ("" if is_open else '"') + escaped(text))
            is_open, text = True, ""
        self._stops = None
        if is_open:
            self._grow("", '"')
        else:
            is_null = nullable and text == "null"
            self._grow("", text if is_null else f'"{escaped(text)}"')

    def _grow(self, name: str, delta: str) -> None:
        """Args: name: the tool, which the call's first delta needs."""
        if name and not self._has_begun:
            self._has_begun = True
            self._events.append(CallEvent("begins", name))
        if self._has_begun:
            self._events.append(CallEvent("grows", delta))

    def _end(self) -> None:
        self._has_begun = False
        self._events.append(CallEvent("ends"))

    def _tails(self) -> Reading:
        for at, tail in enumerate(self._form.tails):
            if at == 0 and self._passed_tail:
                continue
            yield from self._literal(tail, may_end=True)

    # JSON

    def _string(self) -> _Chars:
        """The text of a string after its first quote."""
        seen, is_escaped = ['"'], False
        while True:
            character = yield from self._needed()
            seen.append(character)
            if character == '"' and not is_escaped:
                break
            is_escaped = character == "\\" and not is_escaped
        try:
            return msgspec.json.decode("".join(seen), type=str)
        except (msgspec.DecodeError, UnicodeError):
            raise Malformed("") from None

    def _value(self) -> _Chars:
        """The text of a value."""
        deltas, seen = JsonDeltas(), ""
        character = yield from self._after_spaces()
        while deltas.is_within or character not in (",", "}"):
            if not character:
                raise self._ended()
            seen += deltas.push(character)
            character = yield from self._next()
        self._back = character
        return seen + deltas.flush()

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

    def _needed(self) -> _Chars:
        character = yield from self._next()
        if not character:
            raise self._ended()
        return character

    def _ended(self) -> Exception:
        """What the end of the answer means here."""
        return _Cut() if self._has_begun else Malformed("")

    def _after_spaces(self) -> _Chars:
        character = yield from self._next()
        while character in _SPACES and character:
            character = yield from self._next()
        return character

    def _mark(self, mark: str) -> Reading:
        """Whitespace, and one character."""
        character = yield from self._after_spaces()
        if character != mark:
            raise Malformed(character)

    def _literal(self, text: str, *, may_end: bool = False) -> Reading:
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
            if not seen:
                raise self._ended()
            if not any(text.startswith(seen) for text in texts):
                raise Malformed(seen)
            seen += yield from self._needed()
        return seen

    def _until(self, end: str) -> _Chars:
        """What stands before a text, which is read as well."""
        seen: list[str] = []
        tail = ""
        while tail != end:
            character = yield from self._needed()
            seen.append(character)
            tail = (tail + character)[-len(end) :]
        return "".join(seen)[: -len(end)]


def _checked(text: str) -> str:
    """A JSON object."""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise Malformed("") from None
    return text


def _unframed(value: str) -> str:
    """Without the line breaks that the template puts around a value."""
    return value.removeprefix("\n").removesuffix("\n")
