"""The base of everything that an engine's files hold."""

from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frozen, strictly decoded record."""


def first_difference(one: Record, other: Record) -> tuple[str, str, str]:
    """Where two records of one kind differ first (`.groups[0].kind`), and what each has there."""

    def walk(path: str, a: Any, b: Any) -> tuple[str, str, str] | None:
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            parts = [(f"{path}.{name}", a[name], b[name]) for name in a]
        elif isinstance(a, tuple) and isinstance(b, tuple):
            parts = [(f"{path}[{at}]", *pair) for at, pair in enumerate(zip(a, b, strict=False))]
            parts.append((f"{path}.length", len(a), len(b)))
        else:
            return None if a == b else (path, str(a), str(b))
        return next((found for part in parts if (found := walk(*part))), None)

    found = walk("", msgspec.to_builtins(one), msgspec.to_builtins(other))
    assert found is not None, "the records are equal"
    return found
