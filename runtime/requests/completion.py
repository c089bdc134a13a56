"""A finished request, collected from its outputs; the JSON that `generate` and `client` print."""

from collections.abc import Iterable
from typing import Any

import msgspec

from trtc.protos.errors import ServeError
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.text.answer import AnswerPart, joined, text_of


class Completion(msgspec.Struct, frozen=True):
    """One complete sequence."""

    index: int
    """0 to n - 1."""
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, if requested."""
    parts: tuple[AnswerPart, ...] = ()
    """Parts of an answer that is split, in order."""


class Result(msgspec.Struct, frozen=True):
    """All sequences of one request, by index."""

    request_id: str
    completions: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, if requested."""

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sequence."""
        return self.completions[0].token_ids

    @property
    def parts(self) -> tuple[AnswerPart, ...]:
        """Parts of the first sequence."""
        return self.completions[0].parts

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sequence ended."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the first sequence."""
        return self.completions[0].logprobs

    def as_json(self) -> dict[str, Any]:
        """The first sequence's fields and `usage`; for n > 1 also `completions`, one each."""
        usage = {
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_prompt_tokens": self.usage.cached_prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
        }
        if self.usage.reasoning_tokens:
            usage["reasoning_tokens"] = self.usage.reasoning_tokens
        document = {
            "request_id": self.request_id,
            **_sequence_json(self.completions[0]),
            "usage": usage,
        }
        if self.prompt_logprobs:
            document["prompt_logprobs"] = [_logprobs_json(one) for one in self.prompt_logprobs]
        if len(self.completions) > 1:
            document["completions"] = [_sequence_json(one) for one in self.completions]
        return document


def collect(outputs: Iterable[Output]) -> Result:
    """Join a request's outputs; the last one must carry its usage."""
    collector = Collector()
    for output in outputs:
        collector.add(output)
    return collector.result()


class Collector:
    """Joins outputs as they come."""

    def __init__(self) -> None:
        self._by_index: dict[int, list[Output]] = {}
        self._usage: Usage | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, output: Output) -> None:
        self._by_index.setdefault(output.index, []).append(output)
        self._usage = output.usage or self._usage
        self._prompt_logprobs += output.prompt_logprobs

    def check_complete(self) -> None:
        """Raises ServeError if the last output of the request or of a sequence is missing."""
        if self._usage is None or not all(
            outputs[-1].finish_reason for outputs in self._by_index.values()
        ):
            raise ServeError(
                "the stream ended before the completion did",
                remedy="Ask again, and look into the server's log",
            )

    def result(self) -> Result:
        """The complete result.

        Raises:
            ServeError: the request's last output, or that of a sequence, is missing.
        """
        self.check_complete()
        assert self._usage is not None
        completions = tuple(_join(self._by_index[index]) for index in sorted(self._by_index))
        request_id = self._by_index[completions[0].index][0].request_id
        return Result(request_id, completions, self._usage, tuple(self._prompt_logprobs))


def _join(outputs: list[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        index=last.index,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        parts=joined(part for output in outputs for part in output.parts),
    )


def _sequence_json(completion: Completion) -> dict[str, Any]:
    document: dict[str, Any] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
    }
    if thought := text_of(completion.parts, "reasoning"):
        document["reasoning"] = thought
    if calls := [part for part in completion.parts if part.kind == "call"]:
        document["tool_calls"] = [
            {"id": one.id, "name": one.name, "arguments": one.text} for one in calls
        ]
    if completion.matched_stop:
        document["matched_stop"] = completion.matched_stop
    if completion.logprobs:
        document["logprobs"] = [_logprobs_json(entry) for entry in completion.logprobs]
    return document


def _logprobs_json(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "text": entry.text,
        "logprob": entry.logprob,
        "top": [
            {"token_id": token, "text": text, "logprob": value}
            for (token, value), text in zip(entry.top, entry.top_texts, strict=True)
        ],
    }
