"""A request as its caller words it: text or chat not yet tokens, defaults not yet filled in.

    RequestDraft --tokenise, validate--> GenerationRequest

Clients make drafts, wire formats carry them, the service finishes them.
"""

from dataclasses import dataclass, field

from trtc.runtime.request import SamplingParams


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str

    def as_template_input(self) -> dict[str, str]:
        """The mapping that chat templates expect."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class RequestDraft:
    """Exactly one of `text`, `token_ids` and `chat` is the prompt."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[ChatMessage, ...] | None = None
    model: str = ""
    """Engine name; may be empty when there is one engine."""
    request_id: str = ""
    """Unique among running requests; drawn by the server when empty."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    """New tokens a sequence; None: as many as fit the engine's max_seq_len."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    priority: int = 0
