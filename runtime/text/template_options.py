"""Types of a conversation for Python callers: messages, and variables of the chat template.

They are separate from `chat_of`, which parses them, because every program imports the types for its
signatures, and few have conversations.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
"""Template variables from the tokenizer's configuration."""
ARGUMENTS_TEXT = "arguments_text"
"""Key for the original JSON text of a call's arguments, next to the parsed ones."""
Message = Mapping[str, Any]
"""`role` and `content` (a text, a list of text parts, or None), and where they apply `name`,
`tool_calls`, `tool_call_id` and `reasoning_content`."""


class TemplateOptions(TypedDict, total=False):
    """Variables of a chat template besides the messages. All optional."""

    tools: Sequence[Mapping[str, Any]]
    documents: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    enable_thinking: bool | None
    reasoning_effort: str | None
    add_generation_prompt: bool
    continue_final_message: bool


TEMPLATE_OPTIONS = frozenset(TemplateOptions.__annotations__)
