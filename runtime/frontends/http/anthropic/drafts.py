"""Fields become drafts: turns of a conversation, and what is asked of the answer."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.anthropic.fields import (
    MessageFields,
    Messages,
    OutputConfig,
    System,
)
from trtc.runtime.frontends.http.generation import generation
from trtc.runtime.frontends.http.structured import grammar_of, text_format
from trtc.runtime.requests.draft import RequestDraft
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.text.chat import MAX_MESSAGE_ITEMS, Chat, ChatMessage, ContentPart
from trtc.runtime.text.chat_options import chat_of

PARAMS: Mapping[str, str] = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.continue_final_message": "messages",
    "prompt": "messages",
    "prompt_ids": "messages",
    "stop": "stop_sequences",
}
"""Field of a draft -> its name in the request (`requests.naming`)."""
ROLES = ("user", "assistant", "system")
_KEYS = frozenset({"role", "content"})


def message_draft(fields: MessageFields, request_id: str) -> RequestDraft:
    """The draft of a message.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    if fields.max_tokens is None:
        raise InvalidRequestError(
            "is missing", field="max_tokens", remedy="Say how many tokens the answer may have"
        )
    asked = fields.output_config or OutputConfig()
    if asked.effort is not None:
        raise InvalidRequestError(
            "is not supported by this server", field="output_config.effort", remedy="Leave it out"
        )
    return RequestDraft(
        chat=conversation(fields.system, fields.messages),
        request_id=request_id,
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
        grammar=grammar_of(fields, text_format(asked.format, "output_config.format")),
        **generation(fields),
    )


def conversation(system: System | None, messages: Messages | None) -> Chat:
    """Messages as the chat template is given them. Those of one role in a row are one, and what the
    assistant has begun to say is continued.

    Raises:
        InvalidRequestError: names the message or block that is wrong.
    """
    if not messages:
        raise InvalidRequestError(
            "is missing" if messages is None else "has no messages",
            field="messages",
            remedy="Give a list of messages",
        )
    listed = [_message(one, f"messages[{at}]") for at, one in enumerate(messages)]
    with fields_as_sent(PARAMS):
        turns = _turns((*_system_message(system), *chat_of(listed, {}).messages))
    *before, last = turns
    if last.role != "assistant":
        return Chat(tuple(turns))
    if not any(part.text for part in _parts(last)):
        return Chat(tuple(before))
    return Chat(tuple(turns), continue_final_message=True)


def _system_message(system: System | None) -> Sequence[ChatMessage]:
    if not system:
        return ()
    _check_blocks(system, "system")
    with fields_as_sent({"chat.messages[0].content": "system"}):
        return chat_of([{"role": "system", "content": system}], {}).messages


def _message(message: Mapping[str, Any], field: str) -> Mapping[str, Any]:
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
    _check_blocks(content, f"{field}.content")
    return message


def _check_blocks(content: Any, field: str) -> None:
    if isinstance(content, list) and len(content) > MAX_MESSAGE_ITEMS:
        raise _too_many(len(content), field)


def _turns(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """The messages, with those of one role in a row as one."""
    rows = [list(row) for _, row in groupby(messages, key=lambda one: one.role)]
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def _joined(row: Sequence[ChatMessage]) -> ChatMessage:
    parts = tuple(chain.from_iterable(_parts(one) for one in row))
    if len(parts) > MAX_MESSAGE_ITEMS:
        raise _too_many(len(parts), "messages")
    return ChatMessage(row[0].role, parts=parts)


def _parts(message: ChatMessage) -> Sequence[ContentPart]:
    return message.parts or (ContentPart(message.content),)


def _too_many(num_blocks: int, field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"has {num_blocks} blocks of one turn",
        field=field,
        remedy=f"Give at most {MAX_MESSAGE_ITEMS}",
    )
