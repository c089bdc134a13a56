"""A response that is built from outputs: the object, and its events.

created, in_progress, those of each item (`response_items`), completed | incomplete | failed
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
from trtc.runtime.frontends.http.openai.response_items import Event, Item, new_item
from trtc.runtime.requests.answer_parts import answer_parts
from trtc.runtime.requests.request import FinishReason, Output, Usage
from trtc.runtime.text.answer import AnswerPart

_TOOL = {"description": None, "parameters": None, "strict": False}
"""Defaults of a tool's optional fields."""


@dataclass
class Response:
    """One response, built from its outputs."""

    id: str
    model: str
    fields: ResponseFields
    sampling: Mapping[str, float]
    """The sampling parameters in use."""
    wants_logprobs: bool
    created_at: int = field(default_factory=lambda: int(time.time()))
    _items: list[Item] = field(default_factory=list)
    _logprobs: list[ChosenLogprob] = field(default_factory=list)
    """Log-probabilities of tokens whose text has not been emitted yet."""
    _reason: FinishReason | None = None
    _usage: Usage | None = None
    _error: TrtcError | None = None
    _num_events: int = 0

    @property
    def status(self) -> str:
        if self._error is not None:
            return "failed"
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def take(self, output: Output) -> Sequence[Event]:
        """Add the next output of its sequence; returns the events."""
        self._reason, self._usage = output.finish_reason, output.usage
        if self.wants_logprobs:
            self._logprobs += chat_logprobs(output.logprobs, by_id=False).content
        events: list[Event] = []
        for part in answer_parts(output):
            events += self._add(part)
        if output.finish_reason is not None:
            events += self._close()
        return events

    def fail(self, error: TrtcError) -> None:
        self._error = error

    def whole(self) -> dict[str, Any]:
        """The API's object of the response, with all fields."""
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
            "output": self._documents() if is_over else [],
            "error": self._failure(),
            "tools": [{**_TOOL, **one} for one in asked.tools or ()],
            "tool_choice": asked.tool_choice or "auto",
            "truncation": "disabled",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            **self.sampling,
            "top_logprobs": asked.top_logprobs or 0,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
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
        """Events before the first output."""
        return self.encoded(
            [(kind, {"response": self.whole()}) for kind in ("created", "in_progress")]
        )

    def last_events(self) -> bytes:
        """Events after the last output, or after an error."""
        return self.encoded([(self.status, {"response": self.whole()})])

    def encoded(self, events: Sequence[Event]) -> bytes:
        """The bytes of events, with their sequence numbers."""
        return b"".join(self._event(f"response.{kind}", fields) for kind, fields in events)

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        document = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(document, kind)

    def _add(self, part: AnswerPart) -> Sequence[Event]:
        logprobs = self._logprobs if part.kind == "text" else []
        self._logprobs = []
        if self._items and self._items[-1].takes(part):
            return self._items[-1].add(part, logprobs)
        ended = self._items[-1].end("completed") if self._items else ()
        begun = self._begin(part)
        return (*ended, *begun, *self._items[-1].add(part, logprobs))

    def _begin(self, part: AnswerPart) -> Sequence[Event]:
        number = self.id.removeprefix("resp_")
        self._items.append(new_item(part, number, len(self._items)))
        return self._items[-1].begin()

    def _close(self) -> Sequence[Event]:
        """Events that end the last item; a response without items gets an empty message."""
        begun = () if self._items else self._begin(AnswerPart("text", ""))
        return (*begun, *self._items[-1].end(self._last_status))

    @property
    def _last_status(self) -> str:
        """Status of the last item."""
        return "incomplete" if self.status == "incomplete" else "completed"

    def _documents(self) -> list[Mapping[str, Any]]:
        *before, last = self._items
        return [*(one.document() for one in before), last.document(self._last_status)]

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
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
