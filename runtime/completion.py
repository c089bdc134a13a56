"""A finished request, collected from its outputs; the JSON that `generate` and `client` print."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trtc.runtime.request import FinishReason, Output, TokenLogprobs, Usage


@dataclass(frozen=True)
class Completion:
    """One sequence, whole."""

    index: int
    """0 to n - 1."""
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, when asked for."""


@dataclass(frozen=True)
class Result:
    """All sequences of one request, by index."""

    request_id: str
    completions: tuple[Completion, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sequence."""
        return self.completions[0].token_ids

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
        document = {
            "request_id": self.request_id,
            **_sequence_json(self.completions[0]),
            "usage": usage,
        }
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

    def add(self, output: Output) -> None:
        self._by_index.setdefault(output.index, []).append(output)
        self._usage = output.usage or self._usage

    def result(self) -> Result:
        """The whole; every sequence must have finished."""
        assert self._usage is not None, "the stream ended without usage"
        completions = tuple(_join(self._by_index[index]) for index in sorted(self._by_index))
        request_id = self._by_index[completions[0].index][0].request_id
        return Result(request_id, completions, self._usage)


def _join(outputs: list[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None, f"sequence {last.index} did not finish"
    return Completion(
        index=last.index,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )


def _sequence_json(completion: Completion) -> dict[str, Any]:
    document: dict[str, Any] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
    }
    if completion.matched_stop:
        document["matched_stop"] = completion.matched_stop
    if completion.logprobs:
        document["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [{"token_id": token, "logprob": value} for token, value in entry.top],
            }
            for entry in completion.logprobs
        ]
    return document
