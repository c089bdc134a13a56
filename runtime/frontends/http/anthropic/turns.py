"""Converts messages of blocks to the messages of a chat.

user       text             user
           tool_result      tool, one each, in the order of the blocks
assistant  text             assistant: its content,
           thinking                    its reasoning
           tool_use                    and its calls
system     text             system
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat import MAX_MESSAGE_ITEMS, ChatMessage, ContentPart, ToolCall

ROLES = ("user", "assistant", "system")
_KEYS = frozenset({"role", "content"})
_Block = Mapping[str, Any]


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The messages of a chat. Consecutive messages of one role are merged, except tool results.

    Raises:
        InvalidRequestError: names the message or block that is wrong.
    """
    read = [one for at, message in enumerate(messages) for one in _message(message, at)]
    return joined_turns(read)


def joined_turns(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive messages of one role, except tool results.

    Raises:
        InvalidRequestError: a merged message has too many parts or calls.
    """
    turns: list[ChatMessage] = []
    for role, row in groupby(messages, key=lambda one: one.role):
        listed = list(row)
        turns += listed if role == "tool" or len(listed) == 1 else [_joined(listed)]
    return turns


def system_message(system: str | Sequence[_Block] | None) -> Sequence[ChatMessage]:
    """The message of the field `system`, if it is given.

    Raises:
        InvalidRequestError: names the block that is wrong.
    """
    if not system:
        return ()
    if isinstance(system, str):
        return (ChatMessage("system", system),)
    check_number_of_blocks(len(system), "system")
    return (_of_blocks("system", system, "system"),)


def check_number_of_blocks(number: int, field: str) -> None:
    """Refuse more than MAX_MESSAGE_ITEMS; InvalidRequestError."""
    if number > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError(
            f"has {number} blocks of one turn",
            field=field,
            remedy=f"Give at most {MAX_MESSAGE_ITEMS}",
        )


def _message(message: Mapping[str, Any], at: int) -> Iterator[ChatMessage]:
    field = f"messages[{at}]"
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            "is missing" if role is None else f"is {str(role)[:40]!r}",
            field=f"{field}.role",
            remedy=f"Give one of {', '.join(ROLES)}",
        )
    content = message.get("content")
    if content is None:
        raise InvalidRequestError(
            "is missing", field=f"{field}.content", remedy="Give a text or a list of blocks"
        )
    if unknown := sorted(message.keys() - _KEYS):
        raise InvalidRequestError(
            f"has {unknown[0][:40]!r}", field=field, remedy="Give a role and a content alone"
        )
    if isinstance(content, str):
        yield ChatMessage(role, content)
        return
    if not isinstance(content, list):
        raise _other_kind(content, f"{field}.content", "a text or a list of blocks")
    check_number_of_blocks(len(content), f"{field}.content")
    if role == "user":
        yield from _user(content, f"{field}.content")
    else:
        yield _of_blocks(role, content, f"{field}.content")


def _user(blocks: Sequence[Any], field: str) -> Iterator[ChatMessage]:
    """Tool results and texts of the user, in their order."""
    parts: list[ContentPart] = []
    for at, block in enumerate(blocks):
        if _kind(block, f"{field}[{at}]") != "tool_result":
            parts.append(_text_part(block, f"{field}[{at}]"))
            continue
        if parts:
            yield ChatMessage("user", parts=tuple(parts))
            parts = []
        yield _result(block, f"{field}[{at}]")
    if parts or not blocks:
        yield ChatMessage("user", parts=tuple(parts))


def _result(block: _Block, field: str) -> ChatMessage:
    call_id = _text(block, "tool_use_id", field)
    content = block.get("content")
    if content is None or isinstance(content, str):
        return ChatMessage("tool", content or "", tool_call_id=call_id)
    if not isinstance(content, list):
        raise _other_kind(content, f"{field}.content", "a text or a list of blocks")
    check_number_of_blocks(len(content), f"{field}.content")
    parts = tuple(_text_part(one, f"{field}.content[{at}]") for at, one in enumerate(content))
    return ChatMessage("tool", "", parts, tool_call_id=call_id)


def _of_blocks(role: str, blocks: Sequence[Any], field: str) -> ChatMessage:
    """A message of the system or the assistant."""
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for at, block in enumerate(blocks):
        where = f"{field}[{at}]"
        kind = _kind(block, where)
        if role == "assistant" and kind == "tool_use":
            calls.append(_call(block, where))
        elif role == "assistant" and kind == "thinking":
            thoughts.append(_text(block, "thinking", where))
        elif (
            role != "assistant" or kind != "redacted_thinking"
        ):  # encrypted: only Anthropic can read it
            parts.append(_text_part(block, where))
    return ChatMessage(
        role,
        content=None if calls and not parts else "",
        parts=tuple(parts),
        tool_calls=tuple(calls),
        reasoning_content="\n\n".join(thoughts),
    )


def _call(block: _Block, field: str) -> ToolCall:
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        raise _other_kind(given, f"{field}.input", "an object")
    return ToolCall(
        name=_text(block, "name", field),
        arguments=json.dumps(given, ensure_ascii=False),
        id=_text(block, "id", field),
    )


def _joined(row: Sequence[ChatMessage]) -> ChatMessage:
    parts = tuple(part for one in row for part in parts_of(one))
    calls = tuple(call for one in row for call in one.tool_calls)
    check_number_of_blocks(len(parts) + len(calls), "messages")
    return ChatMessage(
        row[0].role,
        content=None if calls and not parts else "",
        parts=parts,
        tool_calls=calls,
        reasoning_content="\n\n".join(
            one.reasoning_content for one in row if one.reasoning_content
        ),
    )


def parts_of(message: ChatMessage) -> Sequence[ContentPart]:
    """A message's content as parts."""
    if message.parts or message.content is None:
        return message.parts
    return (ContentPart(message.content),)


def _kind(block: Any, field: str) -> str:
    if not isinstance(block, Mapping):
        raise _other_kind(block, field, "an object with a type")
    return str(block.get("type", "text"))


def _text_part(block: Any, field: str) -> ContentPart:
    kind = _kind(block, field)
    if kind != "text":
        raise InvalidRequestError(
            f"{kind[:40]!r} is not supported",
            field=f"{field}.type",
            remedy="Give blocks of type text, and calls, results and thinking where they belong",
        )
    return ContentPart(_text(block, "text", field))


def _text(block: _Block, name: str, field: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        if value is None:
            raise InvalidRequestError("is missing", field=f"{field}.{name}", remedy="Give a text")
        raise _other_kind(value, f"{field}.{name}", "a text")
    return value


def _other_kind(value: object, field: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"is a {type(value).__name__}", field=field, remedy=f"Give {expected}"
    )
