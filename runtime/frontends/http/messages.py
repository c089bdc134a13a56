"""Messages in the shape of the OpenAI API, which several dialects share."""

from collections.abc import Mapping, Sequence
from typing import Any

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat import MAX_MESSAGE_ITEMS

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_OF_LIBRARIES = frozenset({"annotations", "provider_specific_fields", "refusal", "thinking_blocks"})
"""Fields of answers that SDKs and libraries send back, and no template reads."""


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as `chat_of` reads them.

    Raises:
        InvalidRequestError: a role is unknown, or something is missing or too long.
    """
    return [_message(one, at) for at, one in enumerate(messages)]


def _message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """A message without its empty fields: SDKs send answers back with all fields."""
    given = {
        key: value
        for key, value in message.items()
        if value not in (None, [], {}) and key not in _OF_LIBRARIES
    }
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            "is missing" if role is None else f"is {str(role)[:40]!r}",
            field=f"messages[{at}].role",
            remedy=f"Give one of {', '.join(sorted(ROLES))}",
        )
    if "content" not in message and "tool_calls" not in given:
        raise InvalidRequestError(
            "is missing", field=f"messages[{at}].content", remedy="Give a text or parts"
        )
    for name in ("content", "tool_calls"):
        _check_items(given.get(name), f"messages[{at}].{name}")
    if "reasoning" in given:
        given.setdefault("reasoning_content", given["reasoning"])
        del given["reasoning"]
    # None if it is null or missing: templates may distinguish that from "".
    return {**given, "content": "" if message.get("content") == [] else given.get("content")}


def _check_items(value: Any, field: str) -> None:
    if isinstance(value, list) and len(value) > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError(
            f"has {len(value)} items", field=field, remedy=f"Give at most {MAX_MESSAGE_ITEMS}"
        )
