"""The files of an engine as they were found: listed ones with their size, and no others.

The manifest's hashes vouch for the files that it lists. A file beside them would be used without
having been compared with anything, so an engine that has one is refused. Hidden files, which file
managers and network file systems leave behind, are named in a warning and never read.
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
"""Files that nothing runs on."""
_UNHASHED = frozenset({MANIFEST_FILE, SIGNATURE_FILE})
_HARMLESS_PREFIXES = (".", TACTICS_PREFIX)
"""Of names that may stay: hidden files, and tables of an interrupted `trtc tune`."""
_HARMLESS = frozenset({"lost+found"})
"""In the root of every ext4 volume."""


class FileIdentity(NamedTuple):
    """Which file this is, and when it was last written to."""

    device: int
    inode: int
    bytes: int
    modified_ns: int
    """A program can set it."""
    changed_ns: int
    """Also changes with the mode, the owner and the names of the file; nobody can set it."""

    @property
    def content_mark(self) -> tuple[int, int, int, int]:
        """What every ordinary way to write to the file changes."""
        return self.device, self.inode, self.bytes, self.modified_ns

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


def needed_files(manifest: Manifest) -> tuple[str, ...]:
    """What running the engine takes: all but the reports, which are for people."""
    return tuple(name for name in manifest.files if name not in _FOR_PEOPLE)


def find_files(
    engine: Path, manifest: Manifest, names: Collection[str]
) -> Mapping[str, FileIdentity]:
    """Compare the size of some listed files with the manifest, which costs nothing.

    Raises:
        EngineCorruptError: one is missing, of another size, or not a regular file.
    """
    return {name: _find(engine / name, manifest.files[name]) for name in names}


def check_unchanged(engine: Path, found: Mapping[str, FileIdentity]) -> None:
    """See that nobody has written to or replaced a file since `find_files`.

    Raises:
        EngineCorruptError: somebody has; the message names the file.
    """
    for name, identity in found.items():
        if _identity(engine / name) != identity:
            raise changed_while_opening(engine / name)


def changed_while_opening(path: Path) -> EngineCorruptError:
    return EngineCorruptError(
        "was changed while the engine was being opened",
        field=str(path),
        remedy="Open it again when whoever writes to it has ended",
    )


def warn_of_damaged_reports(engine: Path, manifest: Manifest) -> None:
    """Say which reports are missing or of another size, which keeps no engine from running."""
    for name in sorted(_FOR_PEOPLE & manifest.files.keys()):
        try:
            _find(engine / name, manifest.files[name])
        except EngineCorruptError as error:
            logger("trtc.engine").warning(
                "%s: %s; the engine runs without it", error.field, error.problem
            )


def refuse_unlisted(engine: Path, manifest: Manifest) -> None:
    """Look for files that the manifest does not list.

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
