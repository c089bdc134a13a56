"""The base of all records in an engine's files, with decoding and encoding."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trtc.protos.errors import EngineCorruptError
from trtc.protos.files import UnreadableError, read_json


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frozen, strictly decoded record."""


RecordT = TypeVar("RecordT", bound=Record)


def read_record(
    path: Path, kind: type[RecordT], remedy: str = "Build the engine again, or copy it again"
) -> RecordT:
    """Decode a JSON file of an engine; the caller checks its hash.

    Raises:
        EngineCorruptError: unreadable, or not such a record.
    """
    try:
        return read_json(path, kind)
    except UnreadableError as error:
        raise EngineCorruptError(str(error), field=str(path), remedy=remedy) from error


def record_json(record: msgspec.Struct) -> bytes:
    """Indented JSON, keys sorted: equal records give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


def first_difference(one: Record, other: Record) -> tuple[str, str, str]:
    """(path of the first difference of two records, such as `.groups[0].kind`, and both values)."""

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
