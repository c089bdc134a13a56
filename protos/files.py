"""Reads untrusted files: regular ones, of bounded size, with strictly typed JSON.

Opening a FIFO would block, and a device would never end. Symbolic links are followed, because
stores such as hub caches consist of them: the opened file is checked.
"""

import io
import json
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MAX_JSON_BYTES = 256 << 20
"""Most bytes of a JSON file written by a program: plans, tokenizers, indices."""

_T = TypeVar("_T")


class UnreadableError(Exception):
    """The problem in one sentence, without the path: callers raise their own error with both."""


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered.

    Raises:
        UnreadableError: it is missing, not accessible, or not a regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO returns at once. It has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnreadableError(f"cannot be read ({reason})") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError("cannot be read (not a regular file)")
        return io.FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, max_bytes: int) -> bytes:
    """All of a regular file.

    Raises:
        UnreadableError: it cannot be read, or is longer than `max_bytes`.
    """
    with open_regular(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found > max_bytes:
            raise UnreadableError(f"has {found} bytes, more than the {max_bytes} that are read")
        try:
            return _read_to_end(file, found, max_bytes)
        except OSError as error:
            raise UnreadableError(f"cannot be read ({error.strerror})") from error


def _read_to_end(file: io.FileIO, expected: int, max_bytes: int) -> bytes:
    """One read gets all of it, unless the file grows or its size is not known (as in /proc)."""
    content = file.read(expected + 1)
    while len(content) <= max_bytes and (more := file.read(max_bytes + 1 - len(content))):
        content += more
    if len(content) > max_bytes:
        raise UnreadableError(f"has more than the {max_bytes} bytes that are read")
    return content


def decode_json(content: bytes, kind: type[_T]) -> _T:
    """Decode strictly.

    Raises:
        UnreadableError: not JSON, nested too deeply, or not of this type.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(str(error)) from error
    except RecursionError as error:
        raise UnreadableError("JSON is nested too deeply") from error


def check_unique_keys(content: bytes) -> None:
    """Check that no object of a JSON text has a key twice.

    Decoders use the last value, the first, or both, so one program could check a value and another
    use a different one.

    Raises:
        UnreadableError: an object has; the message names the key.
    """
    try:
        # Numbers stay text: those of thousands of digits take Python long to read.
        json.loads(content, object_pairs_hook=_check_pairs, parse_int=_unread, parse_float=_unread)
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    except RecursionError as error:
        raise UnreadableError("JSON is nested too deeply") from error


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise UnreadableError(f"an object has the key {key[:80]!r} twice")
        seen.add(key)


def _unread(number: str) -> None:
    pass


def read_json(path: Path, kind: type[_T], max_bytes: int = MAX_JSON_BYTES) -> _T:
    """Read and decode a JSON file.

    Raises:
        UnreadableError: as read_file and decode_json.
    """
    return decode_json(read_file(path, max_bytes), kind)
