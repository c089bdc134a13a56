"""The input of a response becomes a conversation: items become messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtc.protos.errors import InvalidRequestError

MAX_ITEMS = 1 << 14
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
"""Types of parts that a model reads, or has written."""


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


def _message_of(item: Any, field: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(
            f"is a {type(item).__name__}", field=field, remedy="Give an object with a type"
        )
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
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}


def _output(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    content = _content(item.get("output"), f"{field}.output")
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
}


def _content(content: Any, field: str) -> Any:
    """A text, or parts of type text."""
    if not isinstance(content, list):
        return content
    return [_part(part, f"{field}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, field: str) -> Any:
    if not isinstance(part, Mapping):
        return part  # which is refused where messages are read
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{str(kind)[:40]!r} is not supported",
            field=f"{field}.type",
            remedy="Give parts of type input_text: the model reads nothing else",
        )
    return {"type": "text", "text": part.get("text")}
