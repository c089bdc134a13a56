"""A message as it grows: the object, and its events.

message_start, content_block_start, ping,
content_block_delta ... content_block_stop, message_delta, message_stop
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtc.runtime.frontends.http.events import event
from trtc.runtime.requests.request import FinishReason, Output, Usage

_STOP_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
}


@dataclass
class Message:
    """One message, built from its outputs."""

    id: str
    model: str
    num_prompt_tokens: int
    stop_sequences: frozenset[str] = frozenset()
    returns_ids: bool = False
    """Whether token ids are sent beside the text."""
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _reason: FinishReason | None = None
    _matched_stop: str = ""
    _usage: Usage | None = None

    def take(self, output: Output) -> None:
        """The next output of its sequence."""
        self._texts.append(output.text)
        self._reason, self._matched_stop = output.finish_reason, output.matched_stop
        self._usage = output.usage
        if self.returns_ids:
            self._token_ids += output.token_ids

    def whole(self) -> dict[str, Any]:
        """The object of the API, once the last output was taken."""
        content = [{"type": "text", "text": "".join(self._texts)}]
        ids = {"token_ids": self._token_ids} if self.returns_ids else {}
        return {**self._object(), "content": content, **self._end(), **ids}

    def first_events(self) -> bytes:
        """What comes before the first output."""
        return b"".join(
            (
                _event("message_start", message=self._object()),
                _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
                _event("ping"),
            )
        )

    def delta(self, output: Output) -> bytes:
        """The events of an output; none where it has no text yet."""
        ids = {"token_ids": output.token_ids} if self.returns_ids and output.token_ids else {}
        if not output.text and not ids:
            return b""
        said = {"type": "text_delta", "text": output.text}
        return _event("content_block_delta", index=0, delta=said, **ids)

    def last_events(self) -> bytes:
        """What comes after the last output."""
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=self._end(), usage=self._usage_fields()),
                _event("message_stop"),
            )
        )

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
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage_fields(self) -> dict[str, int]:
        """What the prefix cache gave is known at the end: until then nothing counts as read."""
        usage = self._usage or Usage(self.num_prompt_tokens, 0, 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _event(kind: str, **said: Any) -> bytes:
    return event({"type": kind, **said}, kind)
