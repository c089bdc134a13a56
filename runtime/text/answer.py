"""The parts of an answer: text, thoughts, and calls of tools."""

from collections.abc import Iterable
from typing import Literal

import msgspec


class AnswerPart(msgspec.Struct, frozen=True):
    """A piece of a text or of a thought, or a whole call."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    """Of a call: its arguments, a JSON object as the model wrote it."""
    index: int = 0
    """Of a call: how many came before it in its sequence."""
    id: str = ""
    """Of a call: unique."""
    name: str = ""
    """Of a call: the tool."""


def joined(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The same with adjacent pieces of one text, or of one thought, in one part."""
    runs: list[tuple[AnswerPart, list[str]]] = []
    for part in parts:
        if runs and part.kind != "call" and runs[-1][0].kind == part.kind:
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return tuple(msgspec.structs.replace(part, text="".join(texts)) for part, texts in runs)


def text_of(parts: Iterable[AnswerPart], kind: Literal["text", "reasoning"] = "text") -> str:
    """All text of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)
