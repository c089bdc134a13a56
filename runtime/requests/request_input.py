"""A request as its caller words it: text or chat not yet tokens, defaults not yet filled in.

    RequestInput --tokenise, validate--> GenerationRequest

Clients make request inputs, wire formats carry them, and the service turns them into requests.
"""

from typing import TYPE_CHECKING

import msgspec

from trtc.protos.sampling import SamplingOptions
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.tool_choice import AUTO, ToolChoice

if TYPE_CHECKING:
    from trtc.runtime.text.chat import Chat


class RequestInput(msgspec.Struct, frozen=True):
    """Exactly one of `text`, `token_ids` and `chat` is the prompt; only a chat that is already
    rendered is given together with its `token_ids`."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: "Chat | None" = None
    model: str = ""
    """Engine name; may be empty when there is one engine."""
    request_id: str = ""
    """Unique among the client's running requests; "": the server generates one."""
    sampling: SamplingOptions = {}
    max_tokens: int | None = None
    """New tokens per sequence; None: the model's default, or as many as fit max_seq_len."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    grammar: Grammar | None = None
    """Grammar of the outputs; None: free text."""
    tool_choice: ToolChoice = AUTO
    """Which of the chat's tools the answer calls."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    splits_answer: bool = False
    """Whether outputs of a chat have parts: text, reasoning, tool calls. Otherwise the whole output
    is text, as the model wrote it."""
    thinking_token_budget: int | None = None
    """Most reasoning tokens of a sequence; None: no limit."""
    cache_salt: str = ""
    """A secret: clients that give the same one share cached prefixes. "": prefixes are not shared
    with other clients, unless the server shares them."""
