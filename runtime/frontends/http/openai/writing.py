"""Writes outputs as an answer: whole, or as a stream of events.

data: {chunk}          one per choice and step, those of a step in one write
data: {usage}          if requested
data: [DONE]
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.http.events import begin_events, event
from trtc.runtime.frontends.http.exchange import Exchange, Headers
from trtc.runtime.frontends.http.openai.answers import (
    Answer,
    Choice,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from trtc.runtime.frontends.http.openai.failures import failure
from trtc.runtime.frontends.http.openai.forms import Form
from trtc.runtime.frontends.http.running import OutputBatch
from trtc.runtime.requests import request
from trtc.runtime.requests.completion import Collector

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Head:
    """Fields that all chunks of an answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str

    def answer(self, kind: str, choices: Sequence[Choice]) -> Answer:
        return Answer(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=list(choices),
        )


@dataclass(frozen=True)
class UsageOptions:
    """Options of usage in a stream."""

    at_end: bool = False
    always: bool = False
    """Whether every chunk has the usage so far."""


class Tally:
    """Counts the tokens of all prompts of a request.

    Args:
        counts_drawn: whether drawn tokens count.
    """

    def __init__(self, num_prompt_tokens: int = 0, *, counts_drawn: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._counts_drawn = counts_drawn
        self._num_drawn = 0
        self._ended: list[request.Usage] = []

    def count(self, batch: OutputBatch) -> None:
        for _, output in batch:
            self._num_drawn += len(output.token_ids)
            if output.usage is not None:
                self._ended.append(output.usage)

    def so_far(self) -> Usage:
        return self._usage(self._num_prompt_tokens, self._num_drawn)

    def whole(self) -> Usage:
        usage = self._usage(
            sum(one.prompt_tokens for one in self._ended),
            sum(one.completion_tokens for one in self._ended),
        )
        cached = sum(one.cached_prompt_tokens for one in self._ended)
        usage.prompt_tokens_details = PromptTokensDetails(cached)
        thought = sum(one.reasoning_tokens for one in self._ended)
        if thought:
            usage.completion_tokens_details = CompletionTokensDetails(thought)
        return usage

    def _usage(self, prompt: int, drawn: int) -> Usage:
        drawn = drawn if self._counts_drawn else 0
        return Usage(prompt, drawn, prompt + drawn)


async def write_whole(
    exchange: Exchange,
    outputs: AsyncIterator[OutputBatch],
    head: Head,
    form: Form,
    headers: Headers = (),
) -> None:
    """Answer once all outputs have arrived."""
    collectors = [Collector() for _ in range(form.num_prompts)]
    tally = Tally(counts_drawn=form.returns_generated)
    async for batch in outputs:
        tally.count(batch)
        for prompt, output in batch:
            collectors[prompt].add(output)
    results = [one.result() for one in collectors]
    answer = head.answer(form.whole_object, form.choices(results))
    answer.usage = tally.whole()
    form.complete(answer, results)
    await exchange.answer(200, msgspec.json.encode(answer), headers=headers)


async def write_events(
    exchange: Exchange,
    outputs: AsyncIterator[OutputBatch],
    head: Head,
    form: Form,
    usage: UsageOptions,
    headers: Headers = (),
) -> None:
    """Stream the answer. An error ends the stream as its last event."""
    tally = Tally(form.num_prompt_tokens, counts_drawn=form.returns_generated)
    await begin_events(exchange, headers)
    is_first = True
    try:
        async for batch in outputs:
            tally.count(batch)
            # One chunk per choice: clients read the first choice of a chunk.
            choices = [one for prompt, output in batch for one in form.chunks(prompt, output)]
            chunks = [head.answer(form.chunk_object, (one,)) for one in choices]
            for chunk in chunks:
                chunk.usage = tally.so_far() if usage.always else UNSET
            if chunks and is_first:
                form.complete(chunks[0], ())
                is_first = False
            if chunks:
                await exchange.write(b"".join(map(event, chunks)))
    except TrtcError as error:
        await exchange.end(event(failure(error)) + DONE)
        return
    last = b""
    if usage.at_end:
        answer = head.answer(form.chunk_object, ())
        answer.usage = tally.whole()
        last = event(answer)
    await exchange.end(last + DONE)
