"""Writes outputs as an answer: whole, or as an event for each token."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from trtc.protos.errors import TrtcError
from trtc.runtime.frontends.http.events import begin_events, event
from trtc.runtime.frontends.http.exchange import Exchange, Headers
from trtc.runtime.frontends.http.logprobs import finite
from trtc.runtime.frontends.http.running import OutputBatch
from trtc.runtime.frontends.http.tgi.answers import Details, Event, StreamDetails, Token, Whole
from trtc.runtime.frontends.http.tgi.failures import failure
from trtc.runtime.frontends.http.tgi.request_inputs import ParsedRequest, is_sampled
from trtc.runtime.requests.completion import Collector
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs, Usage
from trtc.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Writer:
    """Writes the answer to one request."""

    exchange: Exchange
    parsed: ParsedRequest
    tokenizer: Tokenizer
    headers: Headers

    async def whole(self, outputs: AsyncIterator[OutputBatch], *, listed: bool = False) -> None:
        """Answer once all outputs have arrived.

        Args:
            listed: whether the answer is a list of one.
        """
        collector = Collector()
        async for batch in outputs:
            for _, output in batch:
                collector.add(output)
        result = collector.result()
        (completion,) = result.completions
        answer = Whole(generated_text=self._text(completion.text, completion.matched_stop))
        if self.parsed.parameters.details:
            answer.details = Details(
                finish_reason=self._reason(completion.finish_reason, completion.matched_stop),
                generated_tokens=result.usage.completion_tokens,
                seed=self._seed,
                tokens=[self._token(one, one.text) for one in completion.logprobs],
            )
            if self.parsed.parameters.top_n_tokens:
                answer.details.top_tokens = [self._top(one) for one in completion.logprobs]
        body = msgspec.json.encode([answer] if listed else answer)
        await self.exchange.answer(200, body, headers=self.headers)

    async def events(self, outputs: AsyncIterator[OutputBatch]) -> None:
        """Stream the answer. An error ends the stream as its last event."""
        await begin_events(self.exchange, self.headers)
        collector, index = Collector(), 0
        try:
            async for batch in outputs:
                events = []
                for _, output in batch:
                    collector.add(output)
                    events += self._events(output, index)
                    index += len(output.token_ids)
                    if output.finish_reason is not None and output.usage is not None:
                        text = self._text(collector.result().text, output.matched_stop)
                        self._end(events[-1], output, output.finish_reason, output.usage, text)
                if events:
                    await self.exchange.write(b"".join(map(event, events)))
        except TrtcError as error:
            await self.exchange.end(event(failure(error)))
            return
        await self.exchange.end()

    def _events(self, output: Output, index: int) -> list[Event]:
        """One event per token; the text of a step is in the event of its last token."""
        last = len(output.logprobs) - 1
        text = output.text + self._stop(output.matched_stop)
        return [
            Event(
                index=index + at + 1,
                token=self._token(one, text if at == last else ""),
                top_tokens=self._top(one) if self.parsed.parameters.top_n_tokens else UNSET,
            )
            for at, one in enumerate(output.logprobs)
        ]

    def _end(
        self, last: Event, output: Output, reason: FinishReason, usage: Usage, text: str
    ) -> None:
        last.generated_text = text
        last.details = StreamDetails(
            finish_reason=self._reason(reason, output.matched_stop),
            generated_tokens=usage.completion_tokens,
            seed=self._seed,
            input_length=usage.prompt_tokens,
        )

    def _token(self, one: TokenLogprobs, text: str) -> Token:
        special = self.tokenizer.is_special(one.token_id)
        return Token(one.token_id, text, finite(one.logprob), special)

    def _top(self, one: TokenLogprobs) -> list[Token]:
        return [
            Token(token, text, finite(value), self.tokenizer.is_special(token))
            for (token, value), text in zip(one.top, one.top_texts, strict=True)
        ]

    def _text(self, text: str, matched_stop: str) -> str:
        """The text with the stop string, as in TGI."""
        prompt = self.parsed.inputs if self.parsed.parameters.return_full_text else ""
        return prompt + text + self._stop(matched_stop)

    @property
    def _seed(self) -> int | None:
        """The given seed, if tokens are sampled."""
        return self.parsed.parameters.seed if is_sampled(self.parsed.parameters) else None

    def _stop(self, matched: str) -> str:
        """The stop string that ended the text; "" if a stop token did."""
        return matched if matched in (self.parsed.parameters.stop or ()) else ""

    def _reason(self, reason: FinishReason, matched_stop: str) -> str:
        if reason is FinishReason.LENGTH:
            return "length"
        return "stop_sequence" if self._stop(matched_stop) else "eos_token"
