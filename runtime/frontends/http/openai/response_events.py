"""A response as it grows: the object, whole at any time, and its events.

created, in_progress, output_item.added, content_part.added,
output_text.delta ... output_text.done, content_part.done, output_item.done,
completed | incomplete | failed
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.http.events import event
from trtc.runtime.frontends.http.logprobs import ChosenLogprob
from trtc.runtime.frontends.http.openai.failures import failure
from trtc.runtime.frontends.http.openai.fields import ResponseFields
from trtc.runtime.frontends.http.openai.logprobs import chat_logprobs
from trtc.runtime.requests.request import FinishReason, Output, Usage

_PLACE = {"output_index": 0, "content_index": 0}
"""Of the only part of the only item."""


@dataclass
class Response:
    """One response, built from its outputs."""

    id: str
    model: str
    fields: ResponseFields
    sampling: Mapping[str, float]
    """The parameters in force."""
    wants_logprobs: bool
    created_at: int = field(default_factory=lambda: int(time.time()))
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[ChosenLogprob] = field(default_factory=list)
    _reason: FinishReason | None = None
    _usage: Usage | None = None
    _error: TrtcError | None = None
    _num_events: int = 0

    @property
    def item_id(self) -> str:
        return self.id.replace("resp_", "msg_", 1)

    @property
    def status(self) -> str:
        if self._error is not None:
            return "failed"
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def take(self, output: Output) -> None:
        """The next output of its sequence."""
        self._texts.append(output.text)
        self._reason = output.finish_reason
        self._usage = output.usage
        if self.wants_logprobs:
            self._logprobs += chat_logprobs(output.logprobs, by_id=False).content

    def fail(self, error: TrtcError) -> None:
        self._error = error

    def whole(self) -> dict[str, Any]:
        """The object of the API, with each of its fields."""
        asked = self.fields
        is_over = self.status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self.status == "incomplete" else None
            ),
            "model": self.model,
            "previous_response_id": None,
            "instructions": asked.instructions,
            "output": [self._item()] if is_over else [],
            "error": self._failure(),
            "tools": [],
            "tool_choice": "auto",
            "truncation": "disabled",
            "parallel_tool_calls": True,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            **self.sampling,
            "top_logprobs": asked.top_logprobs or 0,
            "reasoning": None,
            "usage": self._usage_fields(),
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
            "user": None,
        }

    def first_events(self) -> bytes:
        """What comes before the first output."""
        item = {**self._item(), "status": "in_progress", "content": []}
        return b"".join(
            (
                self._event("response.created", response=self.whole()),
                self._event("response.in_progress", response=self.whole()),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event(
                    "response.content_part.added", item_id=self.item_id, **_PLACE, part=_part("")
                ),
            )
        )

    def delta(self, output: Output) -> bytes:
        """The events of an output; none where it has no text yet."""
        if not output.text:
            return b""
        logprobs = (
            chat_logprobs(output.logprobs, by_id=False).content if self.wants_logprobs else []
        )
        return self._event(
            "response.output_text.delta",
            item_id=self.item_id,
            **_PLACE,
            delta=output.text,
            logprobs=logprobs,
        )

    def last_events(self) -> bytes:
        """What comes after the last output, or after an error."""
        if self._error is not None:
            return self._event("response.failed", response=self.whole())
        part = self._part()
        return b"".join(
            (
                self._event(
                    "response.output_text.done",
                    item_id=self.item_id,
                    **_PLACE,
                    text=part["text"],
                    logprobs=part["logprobs"],
                ),
                self._event(
                    "response.content_part.done", item_id=self.item_id, **_PLACE, part=part
                ),
                self._event("response.output_item.done", output_index=0, item=self._item()),
                self._event(f"response.{self.status}", response=self.whole()),
            )
        )

    def _event(self, kind: str, **said: Any) -> bytes:
        document = {"type": kind, "sequence_number": self._num_events, **said}
        self._num_events += 1
        return event(document, kind)

    def _item(self) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.item_id,
            "status": "incomplete" if self.status == "incomplete" else "completed",
            "role": "assistant",
            "content": [self._part()],
        }

    def _part(self) -> dict[str, Any]:
        return _part("".join(self._texts), self._logprobs)

    def _failure(self) -> dict[str, Any] | None:
        if self._error is None:
            return None
        error = failure(self._error).error
        return {"code": error.code or error.type, "message": error.message}

    def _usage_fields(self) -> dict[str, Any] | None:
        usage = self._usage
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_prompt_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(text: str, logprobs: Sequence[ChosenLogprob] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
