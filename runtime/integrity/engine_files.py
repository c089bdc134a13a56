"""Checks that an engine's directory has the listed files, with their sizes, and no others.

The manifest has the hashes of the files that it lists. Another file could be used without
verification, so an engine with one is refused. Hidden files, which file managers and network file
systems create, only cause a warning and are never read.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from trtc.protos.errors import EngineCorruptError
from trtc.protos.manifest import (
    MANIFEST_FILE,
    REPORT_HTML,
    REPORT_JSON,
    SBOM_FILE,
    SIGNATURE_FILE,
    TACTICS_PREFIX,
    FileFacts,
    Manifest,
)
from trtc.runtime.host.logs import logger

_LOG = "trtc.engine"
REBUILD = "Build the engine again, or copy it again from where it was built"
_FOR_PEOPLE = frozenset({REPORT_JSON, REPORT_HTML, SBOM_FILE})
"""Files for people, which are not needed to run the engine."""
_UNHASHED = frozenset({MANIFEST_FILE, SIGNATURE_FILE})
_HARMLESS_PREFIXES = (".", TACTICS_PREFIX)
"""Prefixes of ignored names: hidden files, and tables of an interrupted `trtc tune`."""
_HARMLESS = frozenset({"lost+found"})
"""Ignored names, which are in the root of every ext4 volume."""


class FileIdentity(NamedTuple):
    """Identity of a file, and the times of its last changes."""

    device: int
    inode: int
    bytes: int
    modified_ns: int
    """mtime; programs can set it."""
    changed_ns: int
    """ctime; also changes with the file's mode, owner and names, and cannot be set."""

    @property
    def content_mark(self) -> tuple[int, int, int, int]:
        """A value that changes when the file is written to in any ordinary way."""
        return self.device, self.inode, self.bytes, self.modified_ns

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


def needed_files(manifest: Manifest) -> tuple[str, ...]:
    """Files that are needed to run the engine: all except the reports."""
    return tuple(name for name in manifest.files if name not in _FOR_PEOPLE)


def find_files(
    engine: Path, manifest: Manifest, names: Collection[str]
) -> Mapping[str, FileIdentity]:
    """Compare the sizes of listed files with the manifest, without reading them.

    Raises:
        EngineCorruptError: a file is missing, has another size, or is not a regular file.
    """
    return {name: _find(engine / name, manifest.files[name]) for name in names}


def check_unchanged(engine: Path, found: Mapping[str, FileIdentity]) -> None:
    """Check that no file has been written to or replaced since `find_files`.

    Raises:
        EngineCorruptError: a file has; the message names it.
    """
    for name, identity in found.items():
        if _identity(engine / name) != identity:
            raise changed_while_opening(engine / name)


def changed_while_opening(path: Path) -> EngineCorruptError:
    return EngineCorruptError(
        "was changed while the engine was being opened",
        field=str(path),
        remedy="Open it again when no process writes to it",
    )


def warn_of_damaged_reports(engine: Path, manifest: Manifest) -> None:
    """Warn of reports that are missing or have another size; the engine runs without them."""
    for name in sorted(_FOR_PEOPLE & manifest.files.keys()):
        try:
            _find(engine / name, manifest.files[name])
        except EngineCorruptError as error:
            logger("trtc.engine").warning(
                "%s: %s; the engine runs without it", error.field, error.problem
            )


def refuse_unlisted(engine: Path, manifest: Manifest) -> None:
    """Refuse files that the manifest does not list.

    Raises:
        EngineCorruptError: there is one; the message names it.
    """
    for name in _unlisted(engine, manifest):
        base = name.rpartition("/")[2]
        if not base.startswith(_HARMLESS_PREFIXES) and base not in _HARMLESS:
            raise EngineCorruptError(
                "is not listed in manifest.json, so that nothing vouches for it",
                field=str(engine / name),
                remedy="Remove it, or copy the engine again from where it was built",
            )
        logger("trtc.engine").warning(
            "%s is not listed in manifest.json and is ignored", engine / name
        )


def _unlisted(engine: Path, manifest: Manifest) -> Iterator[str]:
    folders = {
        name[:end] for name in manifest.files for end, mark in enumerate(name) if mark == "/"
    }
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for path in sorted(_entries(engine / folder)):
            name = f"{folder}/{path.name}" if folder else path.name
            if name in folders and path.is_dir():
                waiting.append(name)
            elif name not in manifest.files and name not in _UNHASHED:
                yield name


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(folder), remedy=REBUILD
        ) from error


def _find(path: Path, facts: FileFacts) -> FileIdentity:
    found = _identity(path)
    if found.bytes != facts.bytes:
        raise EngineCorruptError(
            f"has {found.bytes} bytes, the manifest says {facts.bytes}",
            field=str(path),
            remedy=REBUILD,
        )
    return found


def _identity(path: Path) -> FileIdentity:
    try:
        status = path.stat()
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(path), remedy=REBUILD
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise EngineCorruptError(
            "cannot be read (not a regular file)", field=str(path), remedy=REBUILD
        )
    return FileIdentity.of(status)
