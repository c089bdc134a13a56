"""Recognises directories that trtc wrote: only these are ever replaced.

A directory is trtc's if it has a record (a JSON object with the SHA-256 of its own content under
`digest`) and no files that the record does not list. The check is independent of the schema, so it
also recognises directories of other versions of trtc.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from trtc.protos.files import UnreadableError, read_json

_MAX_RECORD_BYTES = 64 << 20


def why_foreign(directory: Path, record: str, also: tuple[str, ...] = ()) -> str | None:
    """Why `directory` must not be replaced, as a clause; None: trtc wrote it.

    Listed files may be missing, as after an interrupted copy. A file of another size was written by
    another program.

    Args:
        record: name of the record, such as `manifest.json`.
        also: names of further files that the record cannot list.

    Raises:
        OSError: the directory cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is not a directory"
    sizes = _listed_sizes(directory / record)
    if sizes is None:
        return f"it has no {record} that trtc wrote"
    parents = {str(parent) for name in sizes for parent in PurePosixPath(name).parents}
    for name, info in _entries(directory):
        if stat.S_ISDIR(info.st_mode):
            is_known = name in parents
        else:
            is_known = name == record or name in also or name in sizes
            if is_known and not stat.S_ISREG(info.st_mode):
                return f"{name} in it is not a regular file"
            if name in sizes and info.st_size != sizes[name]:
                return f"{name} in it has been changed"
        if not is_known:
            return f"it holds {name}, which {record} does not list"
    return None


def record_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a record's canonical JSON with an empty `digest`."""
    blank = {**content, "digest": ""}
    return hashlib.sha256(msgspec.json.encode(blank, order="sorted")).hexdigest()


def _listed_sizes(record: Path) -> dict[str, int] | None:
    """Bytes of each file that a record lists; None: it is not a record of trtc's."""
    try:
        content = read_json(record, dict[str, Any], _MAX_RECORD_BYTES)
        if content["digest"] != record_digest(content) or "trtc_version" not in content:
            return None
        return {name: facts["bytes"] for name, facts in content["files"].items()}
    except UnreadableError:
        return None
    except (KeyError, TypeError, AttributeError, ValueError):  # JSON of another shape
        return None


def _entries(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below `directory`, as POSIX paths relative to it; links are not followed."""
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                info = entry.stat(follow_symlinks=False)
                yield Path(entry.path).relative_to(directory).as_posix(), info
                if stat.S_ISDIR(info.st_mode):
                    waiting.append(Path(entry.path))
