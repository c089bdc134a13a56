"""The shapes of answers, whole and in chunks of a stream."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trtc.runtime.frontends.http.logprobs import ChosenLogprob


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    content: list[ChosenLogprob]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """vLLM's entry for a token at a position of the prompt."""

    logprob: float
    rank: int | None
    """1: the most likely; None: not among the requested number of most likely tokens."""
    decoded_token: str


class Function(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str
    """A JSON object, or in a stream a delta of its text."""


class ToolCall(msgspec.Struct, kw_only=True):
    index: int | UnsetType = UNSET
    """Only in streams."""
    id: str | UnsetType = UNSET
    """In a stream only in a call's first chunk, like `type` and the function's name."""
    type: str | UnsetType = UNSET
    function: Function


class Message(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    """vLLM's field."""
    reasoning_content: str | UnsetType = UNSET
    """DeepSeek's name of the same."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    """vLLM's: the stop string or stop token that ended it."""
    token_ids: list[int] | UnsetType = UNSET
    """vLLM's `return_token_ids`."""


class ChatChoice(Choice, kw_only=True):
    message: Message
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Choice, kw_only=True):
    """A whole choice, or a chunk of one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """A whole answer, or a chunk of one."""

    id: str
    object: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    """The engine's digest: equal digests give equal tokens for equal seeds."""
    choices: list[Any]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "trtc"
    parent: str | None = None
    grammars: tuple[str, ...] | UnsetType = UNSET
    """Names of the engine's grammars."""


class ModelList(msgspec.Struct):
    data: list[Model]
    object: str = "list"
