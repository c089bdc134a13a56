"""The data types of the runtime: requests and their outputs."""

import enum
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


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request with token ids; `engine/admission.py` makes it of a RequestInput."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """New tokens before which only `max_tokens` ends a sequence: stop tokens are not drawn, and
    stop strings are ignored."""
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Most likely tokens to report at each position of the prompt; None: no log-probabilities of
    the prompt."""
    priority: int = 0
    deadline: float | None = None
    """time.monotonic() after which the request is ended with DEADLINE_EXCEEDED."""
    principal: Principal = LOCAL
    """Who sent it; `request_id` is unique among its live requests."""
    masks: MaskSource | None = None
    """Masks of the tokens that may be drawn; None: every token."""
    answer: "AnswerPlan | None" = None
    """How its outputs are split; None: they are text."""
    cache_salt: str = ""
    share_prefixes: bool = False
    """As in `namespace_of`."""

    @property
    def namespace(self) -> Namespace:
        """Its namespace in the prefix cache."""
        return namespace_of(self.principal, self.cache_salt, share_prefixes=self.share_prefixes)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities, in nats, of one token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""
    top_utf8: tuple[bytes, ...]
    """`utf8` of each token of `top`."""
    utf8: bytes = b""
    """Bytes of the token's text, which may be part of a character; empty without a tokenizer."""

    @property
    def text(self) -> str:
        """The token's text, with U+FFFD for an incomplete character."""
        return self.utf8.decode(errors="replace")

    @property
    def top_texts(self) -> tuple[str, ...]:
        """`text` of each token of `top`."""
        return tuple(one.decode(errors="replace") for one in self.top_utf8)


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """Completion tokens of reasoning; counted if answers are split."""
    queue_s: float | None = None
    """Seconds from the request's submission to the first step that computed it; None: no step did,
    or the request was sent to a server, which has this in its metrics."""


class Output(msgspec.Struct, frozen=True):
    """New output of one sequence since its last Output.

    A msgspec struct because one is made for every token: a frozen dataclass takes five times as
    long.
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
    """Log-probabilities of prompt tokens from the second on, in order, each given the tokens before
    it. In one or several Outputs of the first sequence, before its first drawn token."""
    parts: tuple[AnswerPart, ...] = ()
    """Parts of an answer that is split, in order; `text` is then without reasoning and calls."""
