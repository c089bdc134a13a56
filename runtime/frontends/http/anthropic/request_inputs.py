"""Converts fields to request inputs: the turns of a conversation, and options of the answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.anthropic.fields import CountFields, MessageFields, OutputConfig
from trtc.runtime.frontends.http.anthropic.tools import (
    budget_of,
    choice_of,
    functions_of,
    variables_of,
)
from trtc.runtime.frontends.http.anthropic.turns import (
    joined_turns,
    parts_of,
    system_message,
    turns_of,
)
from trtc.runtime.frontends.http.generation import generation
from trtc.runtime.frontends.http.structured import grammar_of, text_format
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.tools import shown
from trtc.runtime.text.chat import Chat, ChatMessage
from trtc.runtime.text.chat_options import chat_of

PARAMS: Mapping[str, str] = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.continue_final_message": "messages",
    "chat.tools": "tools",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "prompt_ids": "messages",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Field of a request input -> its name in the request (`requests.naming`)."""


def message_input(fields: MessageFields, request_id: str) -> RequestInput:
    """The request input of a message.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    if fields.max_tokens is None:
        raise InvalidRequestError(
            "is missing", field="max_tokens", remedy="Say how many tokens the answer may have"
        )
    asked = fields.output_config or OutputConfig()
    given = fields.tool_choice
    return RequestInput(
        chat=conversation(fields),
        request_id=request_id,
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
        grammar=grammar_of(fields, text_format(asked.format, "output_config.format")),
        tool_choice=choice_of(given),
        splits_answer=True,
        parallel_tool_calls=given is None or not given.disable_parallel_tool_use,
        thinking_token_budget=budget_of(fields.thinking, fields.max_tokens),
        **generation(fields),
    )


def counted(fields: CountFields) -> Chat:
    """The conversation whose tokens are counted.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    return shown(conversation(fields), choice_of(fields.tool_choice))


def conversation(fields: MessageFields | CountFields) -> Chat:
    """Inputs of the chat template.

    Consecutive messages of one role are merged; a last message of the assistant is continued.

    Raises:
        InvalidRequestError: names the field, message or block that is wrong.
    """
    messages = fields.messages
    if not messages:
        raise InvalidRequestError(
            "is missing" if messages is None else "has no messages",
            field="messages",
            remedy="Give a list of messages",
        )
    turns = joined_turns((*system_message(fields.system), *turns_of(messages)))
    *before, last = turns
    if last.role != "assistant" or last.tool_calls:
        return _chat(fields, turns)
    if not any(part.text for part in parts_of(last)):
        return _chat(fields, before)
    return _chat(fields, turns, continue_final_message=True)


def _chat(fields: MessageFields | CountFields, turns: list[ChatMessage], **continued: Any) -> Chat:
    asked = fields.output_config or OutputConfig()
    with fields_as_sent(PARAMS):
        chat = chat_of(
            [],
            {
                "tools": functions_of(fields.tools or ()),
                "chat_template_kwargs": variables_of(fields.thinking, asked.effort),
            },
        )
    return replace(chat, messages=tuple(turns), **continued)
