"""A message that is built from outputs: the object, and its events.

message_start, ping,
content_block_start, content_block_delta ... content_block_stop     for each block
message_delta, message_stop
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trtc.runtime.frontends.http.events import event
from trtc.runtime.requests.answer_parts import answer_parts
from trtc.runtime.requests.request import FinishReason, Output, Usage
from trtc.runtime.text.answer import AnswerPart, is_object

_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
}

_EMPTY = AnswerPart("text", "")

Event = Mapping[str, Any]


@dataclass
class _Block:
    """A block of text, of thinking, or a call."""

    begun_by: AnswerPart
    texts: list[str] = field(default_factory=list)

    @property
    def calls(self) -> bool:
        """Whether it is a call whose arguments are an object."""
        return self.begun_by.kind == "call" and is_object("".join(self.texts))

    def takes(self, part: AnswerPart) -> bool:
        """Whether a part extends this block."""
        return part.continues(self.begun_by)

    def first(self) -> dict[str, Any]:
        """The API's object of the block before any content."""
        if self.begun_by.kind == "call":
            named = {"id": self.begun_by.id, "name": self.begun_by.name}
            return {"type": "tool_use", **named, "input": {}}
        if self.begun_by.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def delta(self, text: str) -> dict[str, str]:
        """The API's object of a delta of the block."""
        if self.begun_by.kind == "call":
            return {"type": "input_json_delta", "partial_json": text}
        if self.begun_by.kind == "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "text_delta", "text": text}

    def whole(self) -> dict[str, Any]:
        """The API's object of the block; a call whose arguments are not an object is text."""
        text = "".join(self.texts)
        if self.begun_by.kind == "call":
            if not self.calls:
                return {"type": "text", "text": text}
            return {**self.first(), "input": msgspec.Raw(text.encode())}
        return {**self.first(), ("thinking" if self.begun_by.kind == "reasoning" else "text"): text}


@dataclass
class Message:
    """One message, built from its outputs."""

    id: str
    model: str
    num_prompt_tokens: int
    stop_sequences: frozenset[str] = frozenset()
    returns_ids: bool = False
    """Whether token ids are sent with the text."""
    _blocks: list[_Block] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _unsent_ids: list[int] = field(default_factory=list)
    """Ids of tokens whose text has not been emitted yet."""
    _reason: FinishReason | None = None
    _matched_stop: str = ""
    _usage: Usage | None = None

    def take(self, output: Output) -> Sequence[Event]:
        """Add the next output of its sequence; returns the events."""
        self._reason, self._matched_stop = output.finish_reason, output.matched_stop
        self._usage = output.usage
        if self.returns_ids:
            self._token_ids += output.token_ids
            self._unsent_ids += output.token_ids
        events = [one for part in answer_parts(output) for one in self._add(part)]
        if output.finish_reason is not None:
            events += self._close()
        return events

    def whole(self) -> dict[str, Any]:
        """The API's object of the message, after the last output."""
        content = [one.whole() for one in self._blocks]
        ids = {"token_ids": self._token_ids} if self.returns_ids else {}
        return {**self._object(), "content": content, **self._end(), **ids}

    def first_events(self) -> bytes:
        """Events before the first output."""
        return encoded([{"type": "message_start", "message": self._object()}, {"type": "ping"}])

    def last_events(self) -> bytes:
        """Events after the last output."""
        ended = {"type": "message_delta", "delta": self._end(), "usage": self._usage_fields()}
        return encoded([ended, {"type": "message_stop"}])

    def _add(self, part: AnswerPart) -> Sequence[Event]:
        if self._blocks and self._blocks[-1].takes(part):
            return (self._delta(part.text),)
        ended = [self._stop()] if self._blocks else []
        return (*ended, self._start(part), self._delta(part.text))

    def _close(self) -> Sequence[Event]:
        """Events that end the last block; a message without blocks gets an empty text."""
        started = [] if self._blocks else [self._start(_EMPTY)]
        rest = [self._delta("")] if self._unsent_ids else []
        return (*started, *rest, self._stop())

    def _start(self, part: AnswerPart) -> Event:
        self._blocks.append(_Block(part))
        return self._of_block("content_block_start", content_block=self._blocks[-1].first())

    def _delta(self, text: str) -> Event:
        block = self._blocks[-1]
        block.texts.append(text)
        ids = {"token_ids": self._unsent_ids} if self._unsent_ids else {}
        self._unsent_ids = []
        return self._of_block("content_block_delta", delta=block.delta(text), **ids)

    def _stop(self) -> Event:
        return self._of_block("content_block_stop")

    def _of_block(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_fields(),
        }

    def _end(self) -> dict[str, str | None]:
        if self._matched_stop in self.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._matched_stop}
        reason = None if self._reason is None else _STOP_REASONS[self._reason]
        if reason == "end_turn" and any(one.calls for one in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage_fields(self) -> dict[str, int]:
        """Usage; cached tokens are known at the end, and until then reported as 0."""
        usage = self._usage or Usage(self.num_prompt_tokens, 0, 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.completion_tokens,
        }


def encoded(events: Sequence[Event]) -> bytes:
    """The bytes of events."""
    return b"".join(event(one, one["type"]) for one in events)
