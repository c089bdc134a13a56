"""The fields of requests that are read, and those that are refused by name; others are ignored.

vLLM's additions to OpenAI's fields have vLLM's names, types and meanings.
"""

from typing import Any, ClassVar

import msgspec

from trtc.runtime.frontends.http.bodies import Fields, Refused
from trtc.runtime.frontends.http.generation import GenerationFields
from trtc.runtime.frontends.http.structured import ResponseFormat

_REFUSED: Refused = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_TAKEN_BY_CHATS = frozenset({"thinking_token_budget", "tool_choice", "tools"})
_REFUSED_CHAT: Refused = {
    name: same for name, same in _REFUSED.items() if name not in _TAKEN_BY_CHATS
}
_REFUSED_RESPONSE: Refused = {
    **_REFUSED_CHAT,
    "truncate_prompt_tokens": (),
    "max_tool_calls": (),
    "response_format": ({"type": "text"},),
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "truncation": ("disabled",),
}


_REFUSED_TOKENIZE: Refused = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "return_token_strs": (False,),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(GenerationFields, kw_only=True):
    """Fields of all endpoints. None: not given."""

    api: ClassVar[str] = "the OpenAI API"
    refused: ClassVar[Refused] = _REFUSED

    stop: str | list[str] | None = None
    # vLLM's own
    include_stop_str_in_output: bool | None = None


class ChoiceFields(CommonFields, kw_only=True):
    """Fields of the endpoints whose answers have choices."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    # vLLM's own
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many of the prompt's last tokens; -1: as many as fit."""


class ChatFields(ChoiceFields, kw_only=True):
    refused: ClassVar[Refused] = _REFUSED_CHAT

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    # vLLM's own
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None


class CompletionFields(ChoiceFields, kw_only=True):
    prompt: str | list[Any] | None = None
    """A text, its token ids, or a list of texts or of lists of token ids."""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    # vLLM's own
    add_special_tokens: bool | None = None


class TextFields(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None


class ReasoningFields(msgspec.Struct, kw_only=True):
    """`reasoning` of a response. None: not given."""

    effort: str | None = None
    generate_summary: str | None = None
    summary: str | None = None
    """Accepted without effect, like the field before it: reasoning is returned unchanged."""


class ResponseFields(CommonFields, kw_only=True):
    """Fields of responses."""

    refused: ClassVar[Refused] = _REFUSED_RESPONSE

    input: str | list[Any] | None = None
    """A text, or items: messages, function calls and their outputs."""
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    text: TextFields | None = None
    top_logprobs: int | None = None
    # vLLM's own
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None


class TokenizeFields(Fields, kw_only=True):
    """Fields for a text or a conversation. None: not given."""

    api: ClassVar[str] = "vLLM"
    refused: ClassVar[Refused] = _REFUSED_TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """For a text; the chat template decides for a conversation."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    # not vLLM's: as in chat completions
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class DetokenizeFields(Fields, kw_only=True):
    api: ClassVar[str] = "vLLM"

    model: str | None = None
    tokens: list[int] | None = None
