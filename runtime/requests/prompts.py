"""Prompts of `generate`: one or several texts, or lists of token ids."""

import operator
from collections.abc import Sequence
from typing import Any

from trtc.protos.errors import InvalidRequestError

Prompt = str | Sequence[int]
"""A text, or the token ids of one."""
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
"""Several prompts, all texts or all token ids."""

_REMEDY = "Give a text, a list of token ids, or a list of texts or of such lists"


def read_prompts(prompt: Prompt | Prompts) -> Prompt | list[Prompt]:
    """Return one prompt unchanged, several as a list. Arrays count as lists.

    Raises:
        InvalidRequestError: names the item that is of another kind.
    """
    if isinstance(prompt, str):
        return prompt
    items = _items(prompt, "prompt")
    first = items[0]
    if isinstance(first, str):
        texts: list[Prompt] = [_text(item, f"prompt[{at}]") for at, item in enumerate(items)]
        return texts
    if _is_list(first):
        ids: list[Prompt] = [_token_ids(item, f"prompt[{at}]") for at, item in enumerate(items)]
        return ids
    return _token_ids(items, "prompt")


def _text(item: Any, field: str) -> str:
    if not isinstance(item, str):
        raise _other_kind(item, field, "Give texts only, or token ids only")
    return item


def _token_ids(ids: Any, field: str) -> tuple[int, ...]:
    items = _items(ids, field)
    if set(map(type, items)) == {int}:  # fast path for long valid lists
        return tuple(items)
    return tuple(_token_id(item, field, at) for at, item in enumerate(items))


def _token_id(item: Any, field: str, at: int) -> int:
    try:
        if isinstance(item, bool):
            raise TypeError
        return operator.index(item)
    except TypeError as error:
        remedy = "Give texts only, or token ids only, which are whole numbers"
        raise _other_kind(item, f"{field}[{at}]", remedy) from error


def _items(value: Any, field: str) -> Sequence[Any]:
    """The items of a list or an array, which must not be empty."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        value = value.tolist()
    if not _is_list(value):
        raise _other_kind(value, field, _REMEDY)
    if not value:
        # The same message as for a text without tokens.
        raise InvalidRequestError("has no tokens", field=field, remedy=_REMEDY)
    return value  # type: ignore[no-any-return]


def _is_list(value: Any) -> bool:
    is_array = hasattr(value, "tolist") and hasattr(value, "__len__")
    is_sequence = isinstance(value, Sequence) or is_array
    return is_sequence and not isinstance(value, str | bytes | bytearray | memoryview)


def _other_kind(value: Any, field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"is a {type(value).__name__}", field=field, remedy=remedy)
