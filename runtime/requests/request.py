"""The data types of the runtime: requests and their outputs."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from trtc.protos.sampling import SamplingParams
from trtc.runtime.requests.principal import LOCAL, Namespace, Principal, namespace_of
from trtc.runtime.requests.token_masks import MaskSource
from trtc.runtime.text.answer import AnswerPart

if TYPE_CHECKING:
    from trtc.runtime.text.answer_plan import AnswerPlan


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class GenerationRequest:
    """One validated request; `service` turns text and chat into `prompt_ids` at the door."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """New tokens before which nothing but `max_tokens` ends a sequence: tokens that would are not
    drawn, stop strings are not looked for."""
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Likeliest tokens to report at each place of the prompt; None: nothing of the prompt."""
    priority: int = 0
    deadline: float | None = None
    """time.monotonic() after which the request is ended with DEADLINE_EXCEEDED."""
    principal: Principal = LOCAL
    """Who sent it; `request_id` is unique among its live requests."""
    masks: MaskSource | None = None
    """Of what may be drawn; None: every token."""
    answer: "AnswerPlan | None" = None
    """How its outputs are split; None: they are text."""
    cache_salt: str = ""
    share_prefixes: bool = False
    """As in `namespace_of`."""

    @property
    def namespace(self) -> Namespace:
        """Where it finds and leaves cached prefixes."""
        return namespace_of(self.principal, self.cache_salt, share_prefixes=self.share_prefixes)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities, in nats, of one token and of the likeliest at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first."""
    top_utf8: tuple[bytes, ...]
    """Of each of `top`, as `utf8`."""
    utf8: bytes = b""
    """The token's own text, or the part of a character that it is; empty without a tokenizer."""

    @property
    def text(self) -> str:
        """The token's own text, with U+FFFD for a part of a character."""
        return self.utf8.decode(errors="replace")

    @property
    def top_texts(self) -> tuple[str, ...]:
        """The same of each of `top`."""
        return tuple(one.decode(errors="replace") for one in self.top_utf8)


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """Of those, tokens of thoughts; counted where answers are split."""
    queue_s: float | None = None
    """Seconds from the request's submission to the first step that computed it; None: none did, or
    the request ran behind a server, which keeps this in its metrics."""


class Output(msgspec.Struct, frozen=True):
    """New output of one sequence since its last Output.

    One is made for every token, and a frozen dataclass takes five times as long to make.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the sequence's last Output only."""
    matched_stop: str = ""
    usage: Usage | None = None
    """Set on the request's last Output only."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of prompt tokens, each given those before it: from the second on, in order. They come before
    the first drawn token, in one Output or several, of the first sequence."""
    parts: tuple[AnswerPart, ...] = ()
    """Of an answer that is split, in order; `text` is then what is neither thought nor call."""
