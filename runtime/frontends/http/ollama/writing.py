"""Writes outputs as an answer: whole, or streamed as a line of JSON for each step.

{"message": {...}, "done": false}
{"message": {...}, "done": true, "done_reason": "stop", "eval_count": 12, ...}
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.http.exchange import Exchange, Headers
from trtc.runtime.frontends.http.logprobs import logprob_entries
from trtc.runtime.frontends.http.ollama.answers import Answer, Function, Message, ToolCall
from trtc.runtime.frontends.http.ollama.models import timestamp
from trtc.runtime.frontends.http.running import OutputBatch
from trtc.runtime.requests.answer_parts import answer_parts
from trtc.runtime.requests.completion import Collector
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.text.answer import AnswerPart, is_object, joined, text_of

LINES = b"application/x-ndjson"

Form = Callable[[Sequence[AnswerPart]], Mapping[str, Any]]
"""Converts parts of an answer to its fields."""


def chat_form(parts: Sequence[AnswerPart]) -> Mapping[str, Any]:
    """Args: parts: with whole calls. One whose arguments are no object is their text."""
    calls = [
        ToolCall(one.id, one.index, Function(one.index, one.name, msgspec.Raw(one.text.encode())))
        for one in parts
        if one.kind == "call" and is_object(one.text)
    ]
    texts = [
        one.text
        for one in parts
        if one.kind == "text" or (one.kind == "call" and not is_object(one.text))
    ]
    message = Message(
        role="assistant",
        content="".join(texts),
        thinking=text_of(parts, "reasoning") or UNSET,
        tool_calls=calls or UNSET,
    )
    return {"message": message}


def generate_form(parts: Sequence[AnswerPart]) -> Mapping[str, Any]:
    return {"response": text_of(parts), "thinking": text_of(parts, "reasoning") or UNSET}


class WholeCalls:
    """Parts of a stream, in which the deltas of a call wait for its end."""

    def __init__(self) -> None:
        self._deltas: list[AnswerPart] = []

    def take(self, output: Output) -> Sequence[AnswerPart]:
        """The parts of an output, and a call before them that they do not go on with."""
        parts: list[AnswerPart] = []
        for part in answer_parts(output):
            if self._deltas and not part.continues(self._deltas[0]):
                parts += self._whole()
            (self._deltas if part.kind == "call" else parts).append(part)
        if output.finish_reason is not None:
            parts += self._whole()
        return parts

    def _whole(self) -> Sequence[AnswerPart]:
        deltas, self._deltas = self._deltas, []
        return joined(deltas)


@dataclass(frozen=True)
class Writer:
    """Writes the answer to one request."""

    exchange: Exchange
    model: str
    form: Form
    headers: Headers
    begun_ns: int
    """time.monotonic_ns() when the request arrived."""
    returns_logprobs: bool = False

    async def loaded(self) -> None:
        """Answer a request that only loads the model."""
        answer = self._answer((), done=True)
        answer.done_reason = "load"
        await self._whole(answer)

    async def whole(self, outputs: AsyncIterator[OutputBatch]) -> None:
        """Answer once all outputs have arrived."""
        collector, first_ns = Collector(), 0
        async for batch in outputs:
            first_ns = first_ns or time.monotonic_ns()
            for _, output in batch:
                collector.add(output)
        result = collector.result()
        answer = self._answer(answer_parts(result.completions[0]), result.logprobs, done=True)
        self._end(answer, result.finish_reason, result.usage, first_ns)
        await self._whole(answer)

    async def lines(self, outputs: AsyncIterator[OutputBatch]) -> None:
        """Stream the answer. An error ends the stream as its last line."""
        await self.exchange.begin(200, content_type=LINES, headers=self.headers)
        first_ns = 0
        calls = WholeCalls()
        last: Output | None = None
        try:
            async for batch in outputs:
                first_ns = first_ns or time.monotonic_ns()
                lines = [
                    self._answer(parts, one.logprobs)
                    for _, one in batch
                    if (parts := calls.take(one)) or one.logprobs
                ]
                if lines:
                    await self.exchange.write(b"".join(map(_line, lines)))
                last = batch[-1][1]
        except TrtcError as error:
            await self.exchange.end(error_body(error) + b"\n")
            return
        assert last is not None and last.finish_reason is not None and last.usage is not None
        answer = self._answer((), done=True)
        self._end(answer, last.finish_reason, last.usage, first_ns)
        await self.exchange.end(_line(answer))

    async def _whole(self, answer: Answer) -> None:
        await self.exchange.answer(200, msgspec.json.encode(answer), headers=self.headers)

    def _answer(
        self,
        parts: Sequence[AnswerPart],
        entries: tuple[TokenLogprobs, ...] = (),
        *,
        done: bool = False,
    ) -> Answer:
        return Answer(
            model=self.model,
            created_at=timestamp(),
            logprobs=logprob_entries(entries) if self.returns_logprobs and entries else UNSET,
            done=done,
            **self.form(parts),
        )

    def _end(self, answer: Answer, reason: FinishReason, usage: Usage, first_ns: int) -> None:
        now_ns = time.monotonic_ns()
        answer.done_reason = reason.value
        answer.total_duration = now_ns - self.begun_ns
        answer.load_duration = 0
        answer.prompt_eval_count = usage.prompt_tokens
        answer.prompt_eval_duration = first_ns - self.begun_ns
        answer.eval_count = usage.completion_tokens
        answer.eval_duration = now_ns - first_ns


def error_body(error: TrtcError) -> bytes:
    """The error response."""
    return msgspec.json.encode({"error": str(error)})


def _line(answer: Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
