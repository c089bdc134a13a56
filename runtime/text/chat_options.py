"""Converts conversations of Python callers, in the shapes of the OpenAI API, to `Chat`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat import Chat, ChatMessage, ContentPart, ToolCall
from trtc.runtime.text.reasoning import reasoning_variables
from trtc.runtime.text.template_options import Message, TemplateOptions

_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
)


def chat_of(messages: Sequence[Message], options: TemplateOptions) -> Chat:
    """A conversation.

    Args:
        messages: oldest first.
        options: `tools` are JSON schemas, `chat_template_kwargs` further variables of the template,
            which override those of `enable_thinking` and `reasoning_effort`.

    Raises:
        InvalidRequestError: a message or an option has another shape; names it.
    """
    if messages is None:
        raise InvalidRequestError(
            "is a NoneType", field="chat.messages", remedy="Give a list of messages"
        )
    messages = _items(messages, "chat.messages")
    return Chat(
        messages=tuple(
            _message(message, f"chat.messages[{at}]") for at, message in enumerate(messages)
        ),
        tools=_json(options.get("tools"), "chat.tools"),
        documents=_json(options.get("documents"), "chat.documents"),
        template_kwargs=_json(_variables(options), "chat.template_kwargs"),
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message", False),
    )


def _variables(options: TemplateOptions) -> Mapping[str, Any] | None:
    """Template variables; `chat_template_kwargs` override those of other options."""
    said = reasoning_variables(options.get("enable_thinking"), options.get("reasoning_effort"))
    given = options.get("chat_template_kwargs")
    if not said or given is None:
        return said or given
    _check_object(given, "chat.template_kwargs")
    return {**said, **given}


def _message(message: Message, field: str) -> ChatMessage:
    _check_object(message, field)
    unknown = set(message) - _MESSAGE_KEYS
    if unknown or "role" not in message or not message.keys() & {"content", "tool_calls"}:
        raise InvalidRequestError(
            f"has the keys {sorted(map(str, message))}",
            field=field,
            remedy='Give each message a "role" and a "content", and of the others only '
            + ", ".join(sorted(_MESSAGE_KEYS - {"role", "content"})),
        )
    content = message.get("content")
    is_text = content is None or isinstance(content, str)
    return ChatMessage(
        role=_text(message, "role", field),
        content=content if is_text else "",
        parts=() if is_text else _parts(content, f"{field}.content"),
        name=_text(message, "name", field),
        tool_calls=tuple(
            _call(call, f"{field}.tool_calls[{at}]")
            for at, call in enumerate(_items(message.get("tool_calls"), f"{field}.tool_calls"))
        ),
        tool_call_id=_text(message, "tool_call_id", field),
        reasoning_content=_text(message, "reasoning_content", field),
    )


def _parts(content: Any, field: str) -> tuple[ContentPart, ...]:
    parts = []
    for at, part in enumerate(_items(content, field)):
        if isinstance(part, str):
            parts.append(ContentPart(part))
            continue
        _check_object(part, f"{field}[{at}]")
        kind = str(part.get("type", "text"))
        if kind != "text":
            raise InvalidRequestError(
                f"{kind[:40]!r} is not supported",
                field=f"{field}[{at}].type",
                remedy="Give parts of type text: the model reads nothing else",
            )
        parts.append(ContentPart(_text(part, "text", f"{field}[{at}]")))
    return tuple(parts)


def _call(call: Any, field: str) -> ToolCall:
    _check_object(call, field)
    function = call.get("function")
    _check_object(function, f"{field}.function")
    arguments = function.get("arguments")
    where = f"{field}.function"
    return ToolCall(
        name=_text(function, "name", where),
        arguments=arguments
        if isinstance(arguments, str)
        else _arguments(arguments, f"{where}.arguments"),
        id=_text(call, "id", field),
        type=_text(call, "type", field) or "function",
    )


def _text(record: Message, key: str, field: str) -> str:
    """A text of a record; one that is None counts as absent."""
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequestError(
            f"is a {type(value).__name__}", field=f"{field}.{key}", remedy="Give a text"
        )
    return value


def _items(value: Any, field: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"is a {type(value).__name__}", field=field, remedy="Give a list")
    return value


def _check_object(value: Any, field: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"is a {type(value).__name__}", field=field, remedy="Give an object with named fields"
        )


def _arguments(value: Any, field: str) -> str:
    """Arguments as JSON in Python's formatting, which templates and models use."""
    return json.dumps(msgspec.json.decode(_json(value or {}, field)), ensure_ascii=False)


def _json(value: Any, field: str) -> str:
    if value is None:
        return ""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, UnicodeError) as error:
        raise InvalidRequestError(
            f"cannot be written as JSON ({error})",
            field=field,
            remedy="Give lists, objects, texts, numbers, booleans and None",
        ) from error
