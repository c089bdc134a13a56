"""Outputs that appear whole or not at all, whatever ends the process that writes them.

A writer works in a hidden directory on the output's file system, which it holds a lock on:

    .<output>.partial/lock        held while the writer lives
    .<output>.partial/new         becomes <output>
    .<output>.partial/scratch     what is needed on the way
    .<output>.partial/replaced    the old output, where the file system cannot exchange two names

There is one writer of an output at a time; others get an OutputError. An error or a signal removes
the
directory. What a killed writer left has no holder of its lock, and the next writer removes it.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from trtc.protos.errors import OutputError
from trtc.protos.signals import deferred_signals

_LOCK, _NEW, _SCRATCH, _REPLACED = "lock", "new", "scratch", "replaced"
_CONTENT = (_NEW, _SCRATCH, _REPLACED)
_CLAIM_ATTEMPTS = 100
"""Each fails only because another writer ended in the midst of it."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than the file system or `ulimit -f` allows",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the disk fails",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EXDEV: "it is a mount point",
    errno.EBUSY: "it is a mount point",
    errno.ENOLCK: "the file system has no locks",
    errno.EOPNOTSUPP: "the file system has no locks",
}


@dataclass(frozen=True)
class Staging:
    """Where an output is made until it is put in its place."""

    output: Path
    new: Path
    """The directory that becomes `output`; empty at first."""
    scratch: Path
    """For files that the output does not keep; empty at first."""


@contextmanager
def staging(output: Path, beside: Path | None = None) -> Iterator[Staging]:
    """Claim `output` and give a place to make it in, which is removed on the way out.

    Args:
        beside: of what the place is a hidden sibling; None: of the output. An ancestor of it.

    Raises:
        OutputError: another trtc is writing this output, or the disk refuses.
    """
    partial = _partial(output, beside or output)
    with claim(partial, output):
        place = Staging(output, partial / _NEW, partial / _SCRATCH)
        place.new.mkdir()
        place.scratch.mkdir()
        yield place


@contextmanager
def claim(partial: Path, output: Path) -> Iterator[None]:
    """Be the one writer of `output` that works in `partial`, which is removed on the way out.

    The output's parents are made, and removed if nothing has come into them.

    Raises:
        OutputError: another trtc is writing this output, or the disk refuses.
    """
    with disk_errors(output), deferred_signals() as signals:
        made: list[Path] = []
        try:
            lock = _acquire(partial, output, made)
        except BaseException:
            _remove_if_empty(made)
            raise
        try:
            _empty(partial, output)
            signals.is_open = True
            signals.deliver()
            yield
        finally:
            signals.is_open = False
            _empty(partial, output)
            with suppress(OSError):
                (partial / _LOCK).unlink()
                partial.rmdir()
            os.close(lock)
            _remove_if_empty(made)


@contextmanager
def claim_directory(directory: Path) -> Iterator[None]:
    """Be the one trtc that changes files of a directory in place.

    Raises:
        OutputError: another one does, or the directory cannot be written to.
    """
    with claim(absolute(directory) / ".partial", directory):
        yield


def put_in_place(place: Staging) -> bool:
    """Rename the new directory to the output; False, and nothing done, where something is there.

    An empty directory is not in the way.
    """
    try:
        # Another writer that gave up may have taken back the parents that it had made.
        place.output.parent.mkdir(parents=True, exist_ok=True)
        place.new.rename(place.output)
    except OSError as error:
        if error.errno in _IN_THE_WAY:
            return False
        raise
    return True


def exchange_with_output(place: Staging, check: Callable[[Path], None]) -> None:
    """Let the new directory and the old output change places; the old one goes with the staging.

    Args:
        check: raises if what was at the output may not be removed: then it is put back.
    """
    with deferred_signals():
        if _exchange(place.new, place.output):
            try:
                check(place.new)
            except BaseException:
                _exchange(place.new, place.output)
                raise
            return
        # The old output is aside for an instant, where the next writer would find it.
        aside = place.new.with_name(_REPLACED)
        place.output.rename(aside)
        try:
            check(aside)
            place.new.rename(place.output)
        except BaseException:
            aside.rename(place.output)
            raise


def settle(directory: Path) -> None:
    """Bring a directory's content to the disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_files(
    directory: Path, contents: Mapping[str, bytes], removed: Sequence[str] = ()
) -> None:
    """Replace files of a directory in the order given, then remove others.

    Everything is on the disk before the first file is replaced, and no signal comes between them:
    a full disk changes nothing.

    Raises:
        OSError: the directory cannot be written to.
    """
    with deferred_signals():
        partials = {name: directory / f".{name}.partial" for name in contents}
        try:
            for name, content in contents.items():
                with partials[name].open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for name, partial in partials.items():
                partial.replace(directory / name)
            for name in removed:
                (directory / name).unlink(missing_ok=True)
            sync(directory)
        finally:
            for partial in partials.values():
                partial.unlink(missing_ok=True)


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Say a full or forbidden disk as the user's problem that it is."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number not in _DISK_ERRORS:
            raise
        raise disk_refusal(output, _DISK_ERRORS[number]) from error


def _error_number(error: Exception) -> int | None:
    """safetensors wraps the system's errors into text."""
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None else int(number[1])


def disk_refusal(output: Path, reason: str) -> OutputError:
    return OutputError(
        f"cannot be written: {reason}",
        field=str(output),
        remedy="Free some space or choose another place; nothing was left behind",
    )


def absolute(path: Path) -> Path:
    """With neither `..` nor a link at the end followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100 (resolve would follow a link at the end)


def _partial(output: Path, beside: Path) -> Path:
    inner = output.relative_to(beside).parts
    return beside.with_name(f".{'.'.join((beside.name, *inner))}.partial")


def _acquire(partial: Path, output: Path, made: list[Path]) -> int:
    """Make `partial` if need be and lock it.

    Args:
        made: parents of the output that were missing are added to it, innermost first.

    Returns:
        The descriptor that holds the lock.
    """
    for _ in range(_CLAIM_ATTEMPTS):
        made[:0] = [path for path in output.parents if not path.exists() and path not in made]
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                partial.mkdir(mode=0o700)
            _check_ours(partial)
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
            descriptor = os.open(partial / _LOCK, flags, 0o600)
        except FileNotFoundError:
            continue  # the writer before has just removed it
        except (FileExistsError, NotADirectoryError) as error:
            raise disk_refusal(output, "a parent is not a directory") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, partial / _LOCK):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OutputError(
        "another trtc is writing it",
        field=str(output),
        remedy="Wait for it to end, or choose another place",
    )


def _check_ours(partial: Path) -> None:
    """Refuse to work in, and later to remove, what no writer made."""
    info = partial.lstat()
    names = {entry.name for entry in partial.iterdir()} if stat.S_ISDIR(info.st_mode) else {""}
    if info.st_uid != os.geteuid() or not names <= {_LOCK, *_CONTENT}:
        raise OutputError(
            "is in the way, and trtc did not make it",
            field=str(partial),
            remedy="Move it, or choose another place for the output",
        )


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _empty(partial: Path, output: Path) -> None:
    replaced = partial / _REPLACED
    if replaced.exists() and not output.exists():
        replaced.rename(output)  # a writer was killed between two renames
    for name in _CONTENT:
        shutil.rmtree(partial / name, ignore_errors=True)


def _remove_if_empty(directories: Sequence[Path]) -> None:
    """Take parents back, innermost first, as far as nothing has come into them."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    status: int = libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    return status == 0
