"""Halves of surrogate pairs, which texts of JSON may have and UTF-8 has not."""

from typing import Any


def without_surrogates(value: Any) -> Any:
    """Text, or lists and dictionaries of it, with a question mark for each half."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(one) for one in value]
    return value
