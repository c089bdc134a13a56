"""From drawn tokens to a request's outputs: detokenising, stop strings, usage."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from trtc.protos.errors import TrtcError
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import (
    FinishReason,
    GenerationRequest,
    Output,
    TokenLogprobs,
    Usage,
)
from trtc.runtime.scheduling.shares import Place
from trtc.runtime.text.stop import StopScanner
from trtc.runtime.text.tokenizer import Tokenizer

Delivery = Sequence[Output] | TrtcError
Sink = Callable[[Delivery], None]


class SequenceText:
    """Incremental text of one sequence. Without a tokenizer it is always empty."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._include_stop = request.include_stop
        shown = frozenset[int]() if request.answer is None else request.answer.shown_ids
        self._decoder = tokenizer.incremental_decoder(shown_ids=shown) if tokenizer else None
        self._scanner = StopScanner(request.stop, include_stop=request.include_stop)
        self._num_early = request.min_tokens
        """Tokens yet to come in whose text stop strings are ignored."""

    def push(self, token_id: int, reason: FinishReason | None) -> tuple[str, str]:
        """The text to emit after a token, and the stop string that ends the sequence, or "".

        Args:
            reason: why the token is the last one, or None. STOP: the token is a stop token, whose
                text is part of the output only with `include_stop`.
        """
        if self._tokenizer is None or self._decoder is None:
            return "", ""
        if reason is FinishReason.STOP:
            token = self._tokenizer.decode((token_id,), skip_special=False)
            return self.flush() + (token if self._include_stop else ""), token
        may_stop = self._num_early == 0
        self._num_early -= not may_stop
        text, stop = self._scanner.push(self._decoder.push((token_id,)), may_stop=may_stop)
        if stop or reason is None:
            return text, stop
        return text + self.flush(), ""

    def flush(self) -> str:
        """The text held back so far, after the last token."""
        if self._decoder is None:
            return ""
        # The decoder holds at most an incomplete character: no stop string can end in it.
        return self._scanner.flush() + self._decoder.flush()


class LiveRequest:
    """A request between its submission and its last delivery. For the loop's thread."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        tokenizer: Tokenizer | None,
        *,
        number: int,
        submitted_at: float,
    ) -> None:
        """
        Args:
            number: unique in its loop, and smaller for earlier requests.
            submitted_at: time.monotonic(), as are all times here.
        """
        self.number = number
        self.request = request
        self.submitted_at = submitted_at
        self.scheduled_at: float | None = None
        """When a step first admitted it; None: not yet."""
        self._request_id = request.request_id
        self.sink = sink
        self.place: Place | None = None
        """Its place in the queue, until a step admits it; None: not submitted yet."""
        self._texts = [SequenceText(request, tokenizer) for _ in range(request.n)]
        self._unfinished = dict.fromkeys(range(request.n))
        self._outputs: list[Output] = []
        self._num_completion_tokens = 0
        self._next_scored = 1
        """Position of the prompt token whose log-probability comes next."""

    @property
    def id(self) -> tuple[Principal, str]:
        """Unique among live requests: principals choose ids independently."""
        return self.request.principal, self.request.request_id

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def add(
        self,
        index: int,
        token_id: int,
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> bool:
        """Add a drawn token; returns whether it ends its sequence."""
        text, stop = self._texts[index].push(token_id, reason)
        if stop:
            reason = FinishReason.STOP
        self._num_completion_tokens += 1
        if reason is not None:
            del self._unfinished[index]
        # By position: this is done for every token, and keywords would cost a quarter more.
        output = Output(self._request_id, index, (token_id,), text, logprobs, reason, stop)
        self._outputs.append(output)
        return reason is not None

    def add_prompt_logprobs(self, position: int, entries: Sequence[TokenLogprobs]) -> bool:
        """Add log-probabilities of the prompt's tokens from `position` on; returns whether any is
        new. After a preemption they are computed again and not delivered twice."""
        new = tuple(entries[max(0, self._next_scored - position) :])
        self._next_scored += len(new)
        if new:
            self._outputs.append(Output(self._request_id, 0, (), "", prompt_logprobs=new))
        return bool(new)

    def abort(self) -> None:
        """End the sequences that have not ended, with the text held back so far."""
        for index in self._unfinished:
            self._outputs.append(
                Output(
                    request_id=self._request_id,
                    index=index,
                    token_ids=(),
                    text=self._texts[index].flush(),
                    finish_reason=FinishReason.ABORTED,
                )
            )
        self._unfinished.clear()

    def take_outputs(self) -> list[Output]:
        """The outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_last_outputs(self, cached_prompt_tokens: int) -> list[Output]:
        """The same for a finished request: the last output carries the usage."""
        outputs = self.take_outputs()
        usage = Usage(
            prompt_tokens=len(self.request.prompt_ids),
            cached_prompt_tokens=cached_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            queue_s=None if self.scheduled_at is None else self.scheduled_at - self.submitted_at,
        )
        outputs[-1] = replace(outputs[-1], usage=usage)
        return outputs
