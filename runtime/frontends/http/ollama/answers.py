"""The shapes of answers, whole and streamed."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trtc.runtime.frontends.http.logprobs import ChosenLogprob


class Function(msgspec.Struct):
    index: int
    """Number of calls before it in the answer."""
    name: str
    arguments: msgspec.Raw
    """A JSON object."""


class ToolCall(msgspec.Struct):
    id: str
    index: int
    """The same as the function's; LiteLLM reads it here."""
    function: Function


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """Whole, or a line of a stream. Durations are nanoseconds."""

    model: str
    created_at: str
    """RFC 3339."""
    message: Message | UnsetType = UNSET
    """Answer of a chat."""
    response: str | UnsetType = UNSET
    """Answer of a prompt."""
    thinking: str | UnsetType = UNSET
    """Reasoning before the answer of a prompt."""
    logprobs: list[ChosenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Details(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str = "trtc"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(msgspec.Struct, kw_only=True):
    """An available model."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of the engine's files."""
    digest: str
    """Digest of the engine's manifest."""
    details: Details


class Loaded(msgspec.Struct, kw_only=True):
    """A loaded model."""

    name: str
    model: str
    size: int
    """Bytes of memory that the engine uses."""
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    """Bytes of `size` on GPUs."""
    context_length: int


class Shown(msgspec.Struct, kw_only=True):
    """Details of a model."""

    parameters: str
    """The model's sampling defaults, one per line."""
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
