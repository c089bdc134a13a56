"""An answer as it is written, and how fast that was."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trtc.commands.completion import Generation
from trtc.runtime.requests.request import FinishReason, Output, Usage


@dataclass
class Answer:
    """What has come of one answer."""

    started: float = field(default_factory=time.monotonic)
    text: str = ""
    num_tokens: int = 0
    num_first: int = 0
    """Tokens that came at once with the first."""
    first_token: float | None = None
    """time.monotonic() when it came, as is `started`."""
    last_token: float = 0.0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """None: it was stopped, or has failed."""

    def add(self, output: Output) -> None:
        if output.token_ids:
            self.last_token = time.monotonic()
            if self.first_token is None:
                self.first_token, self.num_first = self.last_token, len(output.token_ids)
        self.num_tokens += len(output.token_ids)
        self.text += output.text
        self.finish_reason = output.finish_reason or self.finish_reason
        self.usage = output.usage or self.usage

    def tokens_per_s(self) -> float | None:
        """After the first token; None: there are too few to say."""
        if self.first_token is None or self.last_token <= self.first_token:
            return None
        return (self.num_tokens - self.num_first) / (self.last_token - self.first_token)

    def lines(self) -> Iterator[str]:
        """For /stats."""
        if self.usage is not None:
            cached = self.usage.cached_prompt_tokens
            yield f"prompt tokens    {self.usage.prompt_tokens} ({cached} of them cached)"
        yield f"answer tokens    {self.num_tokens}"
        if self.first_token is not None:
            yield f"first token      {1000 * (self.first_token - self.started):.0f} ms"
        if (speed := self.tokens_per_s()) is not None:
            yield f"tokens a second  {speed:.1f}"
        yield f"ended by         {self.finish_reason.value if self.finish_reason else 'you'}"


def write_answer(generation: Generation, answer: Answer, write: Callable[[str], None]) -> None:
    """Write the outputs as they come; `answer` holds what has come, even if this is interrupted."""
    with generation:
        for output in generation:
            answer.add(output)
            if output.text:
                write(output.text)
