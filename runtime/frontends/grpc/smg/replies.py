"""Converts outputs to chunks, one per sequence and step, and to a completion of each sequence.

A stop token (not the tokens of a stop string) is part of the output only if requested; it is
counted in any case.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trtc.protos.smg import trtllm_service_pb2 as pb
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "cancelled",
}


class Ends(NamedTuple):
    """Tokens of a request that end a sequence."""

    eos_token_ids: frozenset[int]
    """End-of-sequence tokens; empty with ignore_eos."""
    stop_token_ids: frozenset[int]
    are_returned: bool
    """Whether they are part of the output."""

    def by(self, output: Output) -> int | None:
        """The token that ended the output's sequence; None: no token did."""
        last = output.token_ids[-1] if output.token_ids else None
        stopped = output.finish_reason is FinishReason.STOP
        return last if stopped and last in self.eos_token_ids | self.stop_token_ids else None


@dataclass
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    num_drawn: int = 0
    """Drawn tokens, including those that are not returned."""
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    complete: pb.GenerateComplete | None = None


class Replies:
    """Makes the responses of one request."""

    def __init__(self, request: pb.GenerateRequest, request_id: str, ends: Ends, n: int) -> None:
        self._request_id = request_id
        self._streaming = request.streaming
        self._num_prompt_tokens = len(request.tokenized.input_token_ids)
        self._ends = ends
        self._sequences = [_Sequence() for _ in range(n)]

    def responses(self, outputs: Sequence[Output]) -> list[pb.GenerateResponse]:
        """Responses for new outputs. Sequences are completed together at the end, when the number
        of cached prompt tokens is known."""
        responses = []
        for output in outputs:
            chunk = self._take(output)
            if self._streaming and chunk.token_ids:
                responses.append(pb.GenerateResponse(request_id=self._request_id, chunk=chunk))
            if output.usage is not None:
                responses += self._completed(output.usage)
        return responses

    def _take(self, output: Output) -> pb.GenerateStreamChunk:
        sequence = self._sequences[output.index]
        sequence.num_drawn += len(output.token_ids)
        ended_by = self._ends.by(output)
        num_returned = len(output.token_ids) - (
            ended_by is not None and not self._ends.are_returned
        )
        chunk = pb.GenerateStreamChunk(
            token_ids=output.token_ids[:num_returned],
            sequence_index=output.index,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sequence.num_drawn,
            logprobs=_logprobs(output.logprobs[:num_returned]),
        )
        sequence.token_ids += chunk.token_ids
        sequence.logprobs += chunk.logprobs
        sequence.prompt_logprobs += _logprobs(output.prompt_logprobs)
        if output.finish_reason is not None:
            sequence.complete = pb.GenerateComplete(finish_reason=_REASONS[output.finish_reason])
            if ended_by in self._ends.stop_token_ids:
                sequence.complete.matched_token_id = ended_by
            elif ended_by is None and output.matched_stop:
                sequence.complete.matched_stop_str = output.matched_stop
        return chunk

    def _completed(self, usage: Usage) -> list[pb.GenerateResponse]:
        responses = []
        for index, sequence in enumerate(self._sequences):
            assert sequence.complete is not None, "usage comes with the last output of all"
            sequence.complete.MergeFrom(
                pb.GenerateComplete(
                    output_token_ids=sequence.token_ids,
                    sequence_index=index,
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=sequence.num_drawn,
                    cached_tokens=usage.cached_prompt_tokens,
                    logprobs=sequence.logprobs,
                    prompt_logprobs=sequence.prompt_logprobs,
                )
            )
            responses.append(
                pb.GenerateResponse(request_id=self._request_id, complete=sequence.complete)
            )
        return responses


def _logprobs(entries: Iterable[TokenLogprobs]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top_logprobs=[
                pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top
            ],
        )
        for entry in entries
    ]
