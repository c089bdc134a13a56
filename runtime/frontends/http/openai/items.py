"""Converts the input of a response to a conversation: items become messages.

message                 a message of its role
reasoning               reasoning ┐
message (assistant)     content   ├ of one message of the assistant, if consecutive
function_call           a call    ┘
function_call_output    a message of the tool
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat import MAX_MESSAGE_ITEMS, ChatMessage, parse_json

MAX_ITEMS = 1 << 14
_THOUGHT = "reasoning_content"
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
"""Types of text parts, of inputs and of earlier outputs."""


def messages_of(input: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Messages in the shape of chat completions, oldest first.

    Raises:
        InvalidRequestError: names the item that is of another kind.
    """
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    if len(input) > MAX_ITEMS:
        raise InvalidRequestError(
            f"has {len(input)} items", field="input", remedy=f"Give at most {MAX_ITEMS}"
        )
    return [_message_of(item, f"input[{at}]") for at, item in enumerate(input)]


def joined(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Merge consecutive reasoning, text and calls of the assistant into one message."""
    turns: list[ChatMessage] = []
    for message in messages:
        if turns and _goes_on(turns[-1], message):
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return tuple(turns)


def _goes_on(turn: ChatMessage, message: ChatMessage) -> bool:
    """Whether a message continues the turn: reasoning is first, then at most one text, then
    calls."""
    if not turn.role == message.role == "assistant":
        return False
    has_only_thoughts = turn.content is None and not turn.tool_calls
    return bool(message.tool_calls) or has_only_thoughts


def _joined(turn: ChatMessage, message: ChatMessage) -> ChatMessage:
    says = message if message.content is not None else turn
    calls = (*turn.tool_calls, *message.tool_calls)
    if len(calls) > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError(
            f"has {len(calls)} calls of one turn",
            field="input",
            remedy=f"Give at most {MAX_MESSAGE_ITEMS}",
        )
    thoughts = [one.reasoning_content for one in (turn, message) if one.reasoning_content]
    return ChatMessage(
        "assistant",
        content=says.content,
        parts=says.parts,
        tool_calls=calls,
        reasoning_content="\n\n".join(thoughts),
    )


def _message_of(item: Any, field: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _other_kind(item, field, "Give an object with a type")
    kind = item.get("type", "message")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise InvalidRequestError(
            f"{str(kind)[:40]!r} is not supported",
            field=f"{field}.type",
            remedy=f"Give one of {', '.join(_READERS)}",
        )
    return read(item, field)


def _message(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    message = {"role": item.get("role")}
    if "content" in item:
        message["content"] = _content(item["content"], f"{field}.content")
    return message


def _call(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not name:
        raise _other_kind(name, f"{field}.name", "Name the function")
    if not isinstance(arguments, str):
        raise _other_kind(arguments, f"{field}.arguments", "Give a JSON object as a text")
    parse_json(
        arguments or "{}", f"{field}.arguments", dict
    )  # checked here, so that errors name the item
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}


def _output(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    content = _content(item.get("output"), f"{field}.output")
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


def _reasoning(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A message with the item's text, or else its summary; encrypted content is ignored."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts in (None, []):
            continue
        if not isinstance(parts, list):
            raise _other_kind(parts, f"{field}.{name}", "Give a list of parts")
        texts = [_thought(part, f"{field}.{name}[{at}]") for at, part in enumerate(parts)]
        return {"role": "assistant", "content": None, _THOUGHT: "\n\n".join(texts)}
    return {"role": "assistant", "content": None}


def _thought(part: Any, field: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise _other_kind(text, f"{field}.text", "Give a text")
    return text


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def _other_kind(value: object, field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"is a {type(value).__name__}", field=field, remedy=remedy)


def _content(content: Any, field: str) -> Any:
    """A text, or parts of type text."""
    if not isinstance(content, list):
        return content
    return [_part(part, f"{field}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, field: str) -> Any:
    if not isinstance(part, Mapping):
        return part  # refused where messages are parsed
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{str(kind)[:40]!r} is not supported",
            field=f"{field}.type",
            remedy="Give parts of type input_text: the model reads nothing else",
        )
    return {"type": "text", "text": part.get("text")}
