"""The fields of requests that are read, and those that are refused by name; others are ignored.

vLLM's additions to OpenAI's fields are accepted here too.
"""

from typing import Any, ClassVar

import msgspec

from trtc.runtime.frontends.http.anthropic.tools import Choice, Thinking
from trtc.runtime.frontends.http.bodies import Fields, Refused
from trtc.runtime.frontends.http.generation import GenerationFields

_API = "Anthropic's API"
_REFUSED: Refused = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_format": (),
}

Messages = list[dict[str, Any]]
System = str | list[dict[str, Any]]
"""A text, or blocks."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config` of a message. None: not given."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessageFields(GenerationFields, kw_only=True):
    """Fields of a message. None: not given."""

    api: ClassVar[str] = _API
    refused: ClassVar[Refused] = _REFUSED

    max_tokens: int | None = None
    messages: Messages | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    system: System | None = None
    thinking: Thinking | None = None
    tool_choice: Choice | None = None
    tools: list[dict[str, Any]] | None = None
    # vLLM's own
    return_token_ids: bool | None = None


class CountFields(Fields, kw_only=True):
    """Fields of a conversation whose tokens are counted."""

    api: ClassVar[str] = _API
    refused: ClassVar[Refused] = _REFUSED

    messages: Messages | None = None
    model: str | None = None
    output_config: OutputConfig | None = None
    """Only its effort is used: it is part of the prompt."""
    system: System | None = None
    thinking: Thinking | None = None
    tool_choice: Choice | None = None
    tools: list[dict[str, Any]] | None = None
