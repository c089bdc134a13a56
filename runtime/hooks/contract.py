"""What a class of hooks is given, and what it may give back.

    on_request -> on_prompt -> logits_processor, for each token -> on_output, for each piece of text

A class has any of the four methods, and is made without arguments, once in each process. None means
no change; `Refused` refuses the request; any other exception fails it. Standard library only: the
processes that call hooks import nothing else of trtc's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

METHODS = ("on_request", "on_prompt", "logits_processor", "on_output")


class Refused(Exception):
    """Raised by a hook: the client gets the text, as 403 or PERMISSION_DENIED."""


@dataclass(frozen=True)
class RequestInfo:
    """Which request a call is about."""

    request_id: str
    """The client's, or drawn by the server. Unique among the client's running requests."""
    model: str
    tenant: str = ""
    """Named by the API key or certificate; "": the client is anonymous."""


@dataclass(frozen=True)
class Message:
    """A message of a conversation: its text, without tool calls."""

    role: str
    content: str


@dataclass(frozen=True)
class Parameters:
    """What `on_request` may change."""

    sampling: Mapping[str, int | float | Mapping[int, float]] = field(default_factory=dict)
    """What the client gave of temperature, top_k, top_p, min_p, repetition_penalty,
    presence_penalty, frequency_penalty, logit_bias and seed; the model's defaults fill in the
    others."""
    max_tokens: int | None = None
    """New tokens a sequence; None: the model's default, or as many as fit."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    edits_logits: bool = True
    """Whether `logits_processor` is called for this request."""


@dataclass(frozen=True)
class Request:
    """A request as it came. One of `text`, `token_ids` and `messages` is its prompt."""

    info: RequestInfo
    parameters: Parameters
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    n: int = 1
    """Sequences."""


@dataclass(frozen=True)
class LogitsEdit:
    """What is done to the logits of one token's draw."""

    allowed: Collection[int] | None = None
    """The only tokens that may be drawn, at least one; None: all."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit, from -100 to 100."""


@dataclass(frozen=True)
class NewOutput:
    """What is new of one sequence: one token or several."""

    index: int
    """From 0 to n - 1."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """stop, length or aborted, on the last one."""


@dataclass(frozen=True)
class Stop:
    """Ends a sequence, with `text` in place of the new one."""

    text: str = ""


class OnRequest(Protocol):
    def on_request(self, request: Request) -> Parameters | None:
        """Before anything is tokenised. Gives the parameters in place of the client's."""
        ...


class OnPrompt(Protocol):
    def on_prompt(self, request: RequestInfo, token_ids: Sequence[int]) -> Sequence[int] | None:
        """Before the engine gets the prompt. Gives the token ids in place of it."""
        ...


class LogitsProcessor(Protocol):
    def logits_processor(
        self, request: RequestInfo, output_ids: Sequence[int]
    ) -> LogitsEdit | None:
        """While the logits of the token after `output_ids` are computed, a sequence's output so
        far. It must answer by its arguments alone: several sequences of a request ask it, and one
        is asked about again after a preemption, or when the process of hooks has ended."""
        ...


class OnOutput(Protocol):
    def on_output(self, request: RequestInfo, output: NewOutput) -> str | Stop | None:
        """Before the client gets new output. Gives the text in place of it, of which the client
        then gets neither token ids nor log-probabilities."""
        ...
