"""Typed reading of config.json: a wrong or missing field is named, never guessed."""

from collections.abc import Mapping
from typing import Any

from trtc.builder.families.bounds import ANY_NUMBER, INTEGERS, MAX_COUNT, NUMBERS
from trtc.protos.errors import CheckpointError, UnsupportedError

_MAX_SHOWN = 80
_MAX_TOKEN_IDS = 4096


class Config:
    """config.json's fields; null counts as absent."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def get(self, key: str) -> Any:
        return self.fields.get(key)

    def with_defaults(self, **defaults: Any) -> "Config":
        """The same, with what the family assumes of fields that are absent or null."""
        given = {key: value for key, value in self.fields.items() if value is not None}
        return Config({**self.fields, **defaults, **given})

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` up to the field's bound.

        Raises:
            CheckpointError: absent without a default, or not such a number.
        """
        value = self.fields.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(key, value, "a positive integer" if least == 1 else "a whole number")
        most = INTEGERS.get(key, MAX_COUNT)
        if value > most:
            raise _wrong(key, value, f"an integer of at most {most}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.fields.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number within the field's bounds.

        Raises:
            CheckpointError: absent without a default, or not such a number.
        """
        value = self.fields.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(key, value, "a number")
        least, most = NUMBERS.get(key, ANY_NUMBER)
        # NaN is in no range; integers may be too large to become a float.
        if not least <= value <= most:
            raise _wrong(key, value, f"a number from {least:g} to {most:g}")
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
        """One id, several, or none; see `token_ids`."""
        return token_ids(self.fields.get(key), f"config.json: {key}")

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
                f"{shown(value)} is not supported",
                field=f"config.json: {key}",
                remedy=f"trtc builds this family only with {choices}",
            )
        return value


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """Token ids of a JSON value: one, a list, or null; without -1, which old files write for none.

    Raises:
        CheckpointError: anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_TOKEN_IDS or not all(_is_token_id(one) for one in ids):
        raise CheckpointError(f"is {shown(value)}, not token ids", field=field)
    return tuple(one for one in ids if one >= 0)


def shown(value: Any) -> str:
    """A value from a file, short enough for a message."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "an enormous number"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= MAX_COUNT


def _wrong(key: str, value: Any, expected: str) -> CheckpointError:
    problem = "is missing" if value is None else f"is {shown(value)}, not {expected}"
    return CheckpointError(
        problem,
        field=f"config.json: {key}",
        remedy="Use the config.json that the checkpoint was saved with",
    )
