"""Splits the text of outputs into parts: text, reasoning, tool calls."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trtc.runtime.requests.request import GenerationRequest, Output
from trtc.runtime.text.answer import joined, text_of

if TYPE_CHECKING:
    from trtc.runtime.text.answer_plan import AnswerPlan


class AnswerSplitter:
    """Splits the outputs of one request. It counts reasoning tokens by output, so the count is
    exact if each output has one token."""

    def __init__(self, plan: "AnswerPlan", num_sequences: int) -> None:
        self._parsers = [plan.parser() for _ in range(num_sequences)]
        self._num_reasoning_tokens = 0

    def split(self, outputs: Sequence[Output]) -> list[Output]:
        """The outputs with their parts; their texts are without reasoning and calls."""
        return [self._split(one) for one in outputs]

    def _split(self, output: Output) -> Output:
        parser = self._parsers[output.index]
        self._num_reasoning_tokens += len(output.token_ids) * parser.in_thought
        parts = [*parser.push(output.text)]
        if output.finish_reason is not None:
            parts += parser.flush()
        usage = output.usage
        if usage is not None:
            usage = replace(usage, reasoning_tokens=self._num_reasoning_tokens)
        return replace(output, text=text_of(parts), parts=joined(parts), usage=usage)


def splitting(
    request: GenerationRequest,
) -> Callable[[Sequence[Output]], list[Output]] | None:
    """A function that splits a request's outputs into parts; None: they are not split."""
    if request.answer is None:
        return None
    return AnswerSplitter(request.answer, request.n).split
