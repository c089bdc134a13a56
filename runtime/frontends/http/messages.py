"""Messages in the shape of the OpenAI API, as several dialects have them."""

from collections.abc import Mapping, Sequence
from typing import Any

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.chat import MAX_MESSAGE_ITEMS

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_OF_LIBRARIES = frozenset({"annotations", "provider_specific_fields", "refusal", "thinking_blocks"})
"""What SDKs and libraries send back of an answer, and no template reads."""


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as `chat_of` reads them.

    Raises:
        InvalidRequestError: a role is none of the API's, or something is missing or too long.
    """
    return [_message(one, at) for at, one in enumerate(messages)]


def _message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """A message without what its sender left empty: SDKs send answers back with all fields."""
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
    # None where it is null or missing: the template may care.
    return {**given, "content": "" if message.get("content") == [] else given.get("content")}


def _check_items(value: Any, field: str) -> None:
    if isinstance(value, list) and len(value) > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError(
            f"has {len(value)} items", field=field, remedy=f"Give at most {MAX_MESSAGE_ITEMS}"
        )
