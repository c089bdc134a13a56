"""Lone surrogates, which JSON texts may contain and UTF-8 cannot encode."""

from typing import Any


def without_surrogates(value: Any) -> Any:
    """Text, or lists and dictionaries of it, with `?` in place of each lone surrogate."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(one) for one in value]
    return value
