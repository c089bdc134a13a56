"""The items of a response while they are generated: reasoning, a message, function calls.

Each has its events, in order:

    message    output_item.added, content_part.added, output_text.delta ...,
               output_text.done, content_part.done, output_item.done
    reasoning  the same with reasoning_text for output_text
    call       output_item.added, function_call_arguments.delta,
               function_call_arguments.done, output_item.done
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trtc.runtime.frontends.http.logprobs import ChosenLogprob
from trtc.runtime.text.answer import AnswerPart

Event = tuple[str, Mapping[str, Any]]
"""The type of an event after `response.`, and its fields."""


class Item(ABC):
    """One item.

    Args:
        number: hexadecimal number of the response.
        output_index: number of items before it.
    """

    prefix: ClassVar[str]
    """Prefix of its id."""

    def __init__(self, number: str, output_index: int) -> None:
        self.id = f"{self.prefix}_{number}" + (f"_{output_index}" if output_index else "")
        self._at = {"item_id": self.id, "output_index": output_index}
        self._index = {"output_index": output_index}

    @abstractmethod
    def document(self, status: str = "completed") -> Mapping[str, Any]:
        """The API's object of the item so far."""

    @abstractmethod
    def takes(self, part: AnswerPart) -> bool:
        """Whether a part extends this item."""

    @abstractmethod
    def add(self, part: AnswerPart, logprobs: Sequence[ChosenLogprob]) -> Sequence[Event]:
        """Add a part; returns the events."""

    @abstractmethod
    def begin(self) -> Sequence[Event]:
        """Events before the first part."""

    def end(self, status: str) -> Sequence[Event]:
        """Events after the last part."""
        item = {"item": self.document(status)}
        return (*self._ends(), ("output_item.done", {**self._index, **item}))

    @abstractmethod
    def _ends(self) -> Sequence[Event]:
        """Events that end the item's content."""


class _Written(Item):
    """An item with one part of text."""

    kind: ClassVar[str]
    """Kind of its answer parts."""
    text_event: ClassVar[str]

    def __init__(self, number: str, output_index: int) -> None:
        super().__init__(number, output_index)
        self._texts: list[str] = []
        self._place = {**self._at, "content_index": 0}

    def takes(self, part: AnswerPart) -> bool:
        return part.kind == self.kind

    def begin(self) -> Sequence[Event]:
        added = {**self.document("in_progress"), "content": []}
        return (
            ("output_item.added", {**self._index, "item": added}),
            ("content_part.added", {**self._place, "part": self._part()}),
        )

    def add(self, part: AnswerPart, logprobs: Sequence[ChosenLogprob]) -> Sequence[Event]:
        self._texts.append(part.text)
        return ((f"{self.text_event}.delta", {**self._place, "delta": part.text}),)

    def _ends(self) -> Sequence[Event]:
        part = self._part()
        return (
            (f"{self.text_event}.done", {**self._place, "text": part["text"]}),
            ("content_part.done", {**self._place, "part": part}),
        )

    @abstractmethod
    def _part(self) -> Mapping[str, Any]:
        """The API's object of its part."""


class MessageItem(_Written):
    prefix: ClassVar[str] = "msg"
    kind: ClassVar[str] = "text"
    text_event: ClassVar[str] = "output_text"

    def __init__(self, number: str, output_index: int) -> None:
        super().__init__(number, output_index)
        self._logprobs: list[ChosenLogprob] = []

    def document(self, status: str = "completed") -> Mapping[str, Any]:
        return {
            "type": "message",
            "id": self.id,
            "status": status,
            "role": "assistant",
            "content": [self._part()],
        }

    def add(self, part: AnswerPart, logprobs: Sequence[ChosenLogprob]) -> Sequence[Event]:
        self._logprobs += logprobs
        ((kind, fields),) = super().add(part, logprobs)
        return ((kind, {**fields, "logprobs": list(logprobs)}),)

    def _ends(self) -> Sequence[Event]:
        (kind, fields), done = super()._ends()
        return ((kind, {**fields, "logprobs": self._logprobs}), done)

    def _part(self) -> Mapping[str, Any]:
        return {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": list(self._logprobs),
        }


class ReasoningItem(_Written):
    prefix: ClassVar[str] = "rs"
    kind: ClassVar[str] = "reasoning"
    text_event: ClassVar[str] = "reasoning_text"

    def document(self, status: str = "completed") -> Mapping[str, Any]:
        return {
            "type": "reasoning",
            "id": self.id,
            "summary": [],
            "content": [self._part()],
            "encrypted_content": None,
            "status": status,
        }

    def _part(self) -> Mapping[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class CallItem(Item):
    prefix: ClassVar[str] = "fc"

    def __init__(self, number: str, output_index: int, call: AnswerPart) -> None:
        super().__init__(number, output_index)
        self._call = call
        self._arguments: list[str] = []

    def document(self, status: str = "completed") -> Mapping[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": "".join(self._arguments),
            "status": status,
        }

    def takes(self, part: AnswerPart) -> bool:
        return part.continues(self._call)

    def begin(self) -> Sequence[Event]:
        return (("output_item.added", {**self._index, "item": self.document("in_progress")}),)

    def add(self, part: AnswerPart, logprobs: Sequence[ChosenLogprob]) -> Sequence[Event]:
        self._arguments.append(part.text)
        return (("function_call_arguments.delta", {**self._at, "delta": part.text}),)

    def _ends(self) -> Sequence[Event]:
        said = {"name": self._call.name, "arguments": "".join(self._arguments)}
        return (("function_call_arguments.done", {**self._at, **said}),)


def new_item(part: AnswerPart, number: str, output_index: int) -> Item:
    """The item that begins with a part."""
    if part.kind == "call":
        return CallItem(number, output_index, part)
    made = ReasoningItem if part.kind == "reasoning" else MessageItem
    return made(number, output_index)
