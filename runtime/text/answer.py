"""The parts of an answer: text, thoughts, and calls of tools."""

from collections.abc import Iterable
from typing import Literal

import msgspec


class AnswerPart(msgspec.Struct, frozen=True):
    """A delta of a text, of a thought or of a call."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    """Of a call: of its arguments. The deltas together are a JSON object, as the model wrote it."""
    index: int = 0
    """Of a call: how many came before it in its sequence."""
    id: str = ""
    """Of a call's first delta: unique."""
    name: str = ""
    """Of a call's first delta: the tool."""

    def continues(self, part: "AnswerPart") -> bool:
        """Whether it is a delta of the same text, thought or call as the part before it."""
        return self.kind == part.kind and self.index == part.index


def joined(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The same with adjacent deltas of one text, thought or call in one part."""
    runs: list[tuple[AnswerPart, list[str]]] = []
    for part in parts:
        if runs and part.continues(runs[-1][0]):
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return tuple(msgspec.structs.replace(part, text="".join(texts)) for part, texts in runs)


def is_object(arguments: str) -> bool:
    """Whether the arguments of a call are a JSON object. They are none if the answer was cut within
    them, or if the model did not write JSON."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True


def text_of(parts: Iterable[AnswerPart], kind: Literal["text", "reasoning"] = "text") -> str:
    """All text of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)
