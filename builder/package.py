"""An engine directory appears whole or not at all.

A build writes into a hidden sibling of the output and renames the engine out of it at the end,
when everything has reached the disk. A build that dies leaves at most that sibling, which the next
build beside it removes: a build holds a lock on its sibling, so one without a holder is dead.

    .<output>.partial-<random>/engine/     becomes <output>
    .<output>.partial-<random>/scratch/    what the build needs on the way
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from trtc.protos.errors import OutputError
from trtc.protos.manifest import CHUNK_BYTES, MANIFEST_FILE, FileFacts, Manifest
from trtc.quant.output import OutputKind, make_parents, refuse_occupied, remove_if_empty

_ENGINE = OutputKind("an engine", mark=MANIFEST_FILE)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENAMETOOLONG: "the name is too long",
}


@dataclass(frozen=True)
class Workspace:
    """An engine under construction."""

    output: Path
    engine: Path
    """The engine to be: on the output's file system, invisible until `publish`."""
    scratch: Path
    """For files that the engine does not keep."""


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that is in the way.

    Raises:
        OutputError: it exists and `force` is off, or it is not an engine and so not ours to
            replace.
    """
    refuse_occupied(output, _ENGINE, force=force)


@contextmanager
def workspace(output: Path, *, force: bool) -> Iterator[Workspace]:
    """A directory to build in; it is removed on the way out unless it was published.

    Raises:
        OutputError: the output is in the way, or the disk refuses (full, read-only).
    """
    output = Path(os.path.abspath(output))  # noqa: PTH100 (resolve would follow a link at the end)
    check_output(output, force=force)
    with _disk_errors(output):
        made_parents = make_parents(output)
        _remove_dead_builds(output)
        partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(output), dir=output.parent))
    lock = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _disk_errors(output):
            work = Workspace(output, partial / "engine", partial / "scratch")
            work.engine.mkdir()
            work.scratch.mkdir()
            yield work
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)
        remove_if_empty(made_parents)


def seal(
    engine: Path, manifest: Manifest, known: Mapping[str, FileFacts] = MappingProxyType({})
) -> Manifest:
    """Hash the files that are there and write the manifest over them.

    Args:
        manifest: complete but for `files` and `digest`.
        known: files that have been hashed and not been written since.

    Returns:
        The manifest as written.
    """
    paths = sorted(path for path in engine.rglob("*") if path.is_file())
    names = {path.relative_to(engine).as_posix(): path for path in paths}
    names.pop(MANIFEST_FILE, None)
    files = {name: known.get(name) or file_facts(path) for name, path in names.items()}
    sealed = msgspec.structs.replace(manifest, files=files).sealed()
    (engine / MANIFEST_FILE).write_bytes(sealed.to_json())
    return sealed


def publish(
    work: Workspace,
    manifest: Manifest,
    *,
    force: bool,
    known: Mapping[str, FileFacts] = MappingProxyType({}),
) -> Manifest:
    """Seal the engine and put it in its place; `known` as in `seal`.

    Raises:
        OutputError: something has come in the way meanwhile.
    """
    sealed = seal(work.engine, manifest, known)
    for path in [*work.engine.rglob("*"), work.engine]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        _fsync(path)
    check_output(work.output, force=force)
    _put_in_place(work)
    _fsync(work.output.parent)
    return sealed


def file_facts(path: Path) -> FileFacts:
    """Hash a file; a large one chunk by chunk too, in the same reading."""
    whole, chunks = hashlib.sha256(), []
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(hashlib.sha256(chunk).hexdigest())
    return FileFacts(
        sha256=whole.hexdigest(),
        bytes=path.stat().st_size,
        chunks=tuple(chunks) if len(chunks) > 1 else (),
    )


def _put_in_place(work: Workspace) -> None:
    """Rename; an older engine changes places in one step and goes with the workspace."""
    if not work.output.exists():
        work.engine.rename(work.output)
    elif not _exchange(work.engine, work.output):
        # A file system without exchange: the old engine is aside for an instant, never lost.
        aside = work.scratch / "replaced"
        work.output.rename(aside)
        try:
            work.engine.rename(work.output)
        except OSError:
            aside.rename(work.output)
            raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    status: int = libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    return status == 0


def _partial_prefix(output: Path) -> str:
    return f".{output.name}.partial-"


def _remove_dead_builds(output: Path) -> None:
    for partial in output.parent.glob(f"{_glob_escaped(_partial_prefix(output))}*"):
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial, ignore_errors=True)
        except BlockingIOError:
            continue  # another build is at work there
        finally:
            os.close(descriptor)


def _glob_escaped(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    """Say a full or forbidden disk as the user's problem that it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise OutputError(
            _DISK_ERRORS[error.errno],
            field=str(output),
            remedy="Free some space or choose another --output; nothing was left behind",
        ) from error
