"""What a request's caller is told: tokens become text, stop strings end it, usage is counted."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from trtc.protos.errors import TrtcError
from trtc.runtime.request import FinishReason, GenerationRequest, Output, TokenLogprobs, Usage
from trtc.runtime.stop import StopScanner
from trtc.runtime.tokenizer import Tokenizer

Delivery = Sequence[Output] | TrtcError
Sink = Callable[[Delivery], None]


class SequenceText:
    """Text of one sequence as its tokens come. Without a tokenizer it is always empty."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._include_stop = request.include_stop
        self._decoder = tokenizer.incremental_decoder() if tokenizer else None
        self._scanner = StopScanner(request.stop, include_stop=request.include_stop)

    def push(self, token_id: int, reason: FinishReason | None) -> tuple[str, str]:
        """The text that a token makes certain, and the stop that ends the sequence or "".

        Args:
            reason: why the token is the last one; STOP: because of the token itself, whose text
                belongs to the output only with `include_stop`.
        """
        if self._tokenizer is None or self._decoder is None:
            return "", ""
        if reason is FinishReason.STOP:
            token = self._tokenizer.decode((token_id,), skip_special=False)
            return self.flush() + (token if self._include_stop else ""), token
        text, stop = self._scanner.push(self._decoder.push((token_id,)))
        if stop or reason is None:
            return text, stop
        return text + self.flush(), ""

    def flush(self) -> str:
        """What was held back, now that no more tokens come."""
        if self._decoder is None:
            return ""
        # What the decoder holds is a broken character: no stop string can end in it.
        return self._scanner.flush() + self._decoder.flush()


class LiveRequest:
    """A request between its submission and its last delivery; the loop's thread uses it."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        tokenizer: Tokenizer | None,
        *,
        submitted_at: float,
    ) -> None:
        """`submitted_at`: time.monotonic(), as are all times here."""
        self.request = request
        self.submitted_at = submitted_at
        self.scheduled_at: float | None = None
        """When a step took it in first; None: not yet."""
        self._request_id = request.request_id
        self.sink = sink
        self.queued = True
        """Not admitted to a step yet: counts towards the queue's bound."""
        self._texts = [SequenceText(request, tokenizer) for _ in range(request.n)]
        self._unfinished = dict.fromkeys(range(request.n))
        self._outputs: list[Output] = []
        self._num_completion_tokens = 0

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
        """Take a drawn token; whether it ends its sequence."""
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

    def abort(self) -> None:
        """End what has not ended, with the text held back so far."""
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
        """The same for a request that has finished: the very last one carries the usage."""
        outputs = self.take_outputs()
        usage = Usage(
            prompt_tokens=len(self.request.prompt_ids),
            cached_prompt_tokens=cached_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            queue_s=None if self.scheduled_at is None else self.scheduled_at - self.submitted_at,
        )
        outputs[-1] = replace(outputs[-1], usage=usage)
        return outputs
