"""The nouns of the runtime: what a caller asks for, and what it is told."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Defaults draw from the model's own distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: drawn when the request is admitted."""

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


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
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    priority: int = 0
    deadline: float | None = None
    """time.monotonic() after which the request is ended with DEADLINE_EXCEEDED."""


@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    queue_s: float | None = None
    """Seconds from the request's submission to the first step that computed it; None: none did, or
    the request ran behind a server, which keeps this in its metrics."""


@dataclass(frozen=True)
class Output:
    """New output of one sequence since its last Output."""

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
