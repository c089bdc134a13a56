"""Arguments of a call in deltas of JSON text, while the model writes them.

A delta never ends within an escape, a number or a word: what may go on is held back. Each reader
is pushed characters from the opening bracket on; `is_whole` says that the bracket has closed.
"""

import json
import re
from collections.abc import Callable
from typing import Protocol

import msgspec

from trtc.protos.answer_formats import Notation, quote_of

_OPEN_ESCAPE = re.compile(
    r"\\(u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?)?"
)
"""The beginning of an escape, or the first half of a pair of surrogates."""
_JSON_STOPS = re.compile(r'["\\]')
_MARKS = frozenset("{}[],:")
_DELIMITERS = _MARKS | frozenset('" \t\r\n')


class ArgumentDeltas(Protocol):
    """Characters to deltas of JSON text."""

    is_whole: bool

    @property
    def stops(self) -> re.Pattern[str] | None:
        """Within a text, what ends a run of characters that may be pushed at once."""

    def push(self, character: str) -> str:
        """The delta that a character makes certain, or a run of them."""

    def flush(self) -> str:
        """What is held back, now that no more comes."""


class JsonDeltas:
    """Of a JSON object or array: the deltas are its own text, character for character."""

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_text = False
        self._held = ""
        """The beginning of an escape, or of a number or word."""

    @property
    def stops(self) -> re.Pattern[str] | None:
        return _JSON_STOPS if self._in_text and not self._held else None

    @property
    def is_within(self) -> bool:
        """Whether a text or a bracket is open."""
        return self._in_text or self._depth > 0

    def push(self, character: str) -> str:
        if not self._in_text:
            return self._outside(character)
        held = self._held
        if not held:
            return self._inside(character)
        if _OPEN_ESCAPE.fullmatch(held + character):
            self._held = held + character
            return ""
        self._held = ""
        if held[-1] == "\\":
            return held + character
        return held + self._inside(character)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _inside(self, character: str) -> str:
        if character == "\\":
            self._held = character
            return ""
        self._in_text = character != '"'
        return character

    def _outside(self, character: str) -> str:
        if character not in _DELIMITERS:
            self._held += character
            return ""
        self._in_text = character == '"'
        if character in _MARKS:
            self._depth += _step(character)
            self.is_whole = self._depth == 0
        return self.flush() + character


class LiteralDeltas:
    """Of an object in Gemma's notation, whose keys have no quotes: the deltas are its JSON."""

    def __init__(self) -> None:
        self.is_whole = False
        self._quote = quote_of("literal")
        self._stops = stops_of((self._quote,))
        self._depth = 0
        self._in_text = False
        self._held = ""
        """In a text, the beginning of its quote, perhaps; outside, what has no quotes."""

    @property
    def stops(self) -> re.Pattern[str] | None:
        return self._stops if self._in_text and not self._held else None

    def push(self, character: str) -> str:
        if self._in_text:
            return self._inside(character)
        self._held += character
        if self._held.endswith(self._quote):
            self._in_text = True
            return self._bare(len(self._quote)) + '"'
        if character not in _MARKS:
            return ""
        self._depth += _step(character)
        self.is_whole = self._depth == 0
        return self._bare(1, is_key=character == ":") + character

    def flush(self) -> str:
        """Nothing: what is held back is no JSON yet."""
        self._held = ""
        return ""

    def _inside(self, character: str) -> str:
        if not self._held and character[0] != self._quote[0]:
            return escaped(character)
        self._held += character
        if self._held == self._quote:
            self._in_text, self._held = False, ""
            return '"'
        certain, self._held = split_held(self._held, (self._quote,))
        return escaped(certain)

    def _bare(self, size: int, *, is_key: bool = False) -> str:
        """What stood without quotes before a mark of a size."""
        text, self._held = self._held[:-size].strip(), ""
        if not text:
            return ""
        return json.dumps(text, ensure_ascii=False) if is_key else json_or_text(text)


def deltas_of(notation: Notation) -> ArgumentDeltas:
    """The reader of a notation."""
    made: Callable[[], ArgumentDeltas] = LiteralDeltas if notation == "literal" else JsonDeltas
    return made()


def escaped(text: str) -> str:
    """A text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_or_text(text: str) -> str:
    """JSON as it is, and anything else as a text of JSON."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return json.dumps(text, ensure_ascii=False)
    return text


def stops_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """What may begin a mark."""
    return re.compile("[" + "".join(re.escape(mark[0]) for mark in marks) + "]")


def split_held(text: str, marks: tuple[str, ...]) -> tuple[str, str]:
    """A text, and its end that may be the beginning of a mark."""
    at = 0
    while at < len(text) and not any(mark.startswith(text[at:]) for mark in marks):
        at += 1
    return text[:at], text[at:]


def _step(character: str) -> int:
    """By how much a mark changes the depth."""
    return (character in "{[") - (character in "}]")
