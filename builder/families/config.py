"""Typed reading of config.json: a wrong or missing field is named, never guessed."""

import math
from collections.abc import Mapping
from typing import Any

from trtc.protos.errors import CheckpointError, UnsupportedError


class Config:
    """config.json's fields; null counts as absent."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def get(self, key: str) -> Any:
        return self.fields.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            CheckpointError: absent without a default, or not a positive integer.
        """
        value = self.fields.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _wrong(key, value, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.fields.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            CheckpointError: absent without a default, or not a number.
        """
        value = self.fields.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(key, value, "a number")
        if not math.isfinite(value):
            raise _wrong(key, value, "a finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.fields.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    def sequence(self, key: str) -> tuple[Any, ...] | None:
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise _wrong(key, value, "a list")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, several, or none."""
        value = self.fields.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise _wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """The value under `key` when trtc can build it.

        Raises:
            UnsupportedError: a feature of the family that trtc does not have.
        """
        value = self.fields.get(key)
        value = default if value is None else value
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise UnsupportedError(
                f"{value!r} is not supported",
                field=f"config.json: {key}",
                remedy=f"trtc builds this family only with {choices}",
            )
        return value


def _wrong(key: str, value: Any, expected: str) -> CheckpointError:
    problem = "is missing" if value is None else f"is {value!r}, not {expected}"
    return CheckpointError(
        problem,
        field=f"config.json: {key}",
        remedy="Use the config.json that the checkpoint was saved with",
    )
