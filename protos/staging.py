"""Atomic outputs, which appear as a whole or not at all, even if the writing process is killed.

A writer works in a hidden directory on the output's file system, and holds a lock of it:

    .<output>.partial/lock        held while the writer lives
    .<output>.partial/new         becomes <output>
    .<output>.partial/scratch     what is needed on the way
    .<output>.partial/journal     what a writer that is killed or interrupted leaves to the next
    .<output>.partial/replaced    the old output, where the file system cannot exchange two names

There is one writer of an output at a time; others get an OutputError. An error or a signal removes
the directory, but a signal leaves a journal that has something in it. The directory of a killed
writer is not locked, and the next writer removes all but the journal.
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

_LOCK, _NEW, _SCRATCH, _REPLACED, _JOURNAL = "lock", "new", "scratch", "replaced", "journal"
_CONTENT = (_NEW, _SCRATCH, _REPLACED)
_CLAIM_ATTEMPTS = 100
"""An attempt fails only if another writer ends during it."""
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
    """Where an output is written before it is renamed into place."""

    output: Path
    new: Path
    """The directory that becomes `output`; empty at first."""
    scratch: Path
    """For temporary files; empty at first."""

    @property
    def journal(self) -> Path:
        """For what the next writer can go on from; absent, or as a killed one left it."""
        return self.scratch.with_name(_JOURNAL)


@contextmanager
def staging(output: Path, beside: Path | None = None) -> Iterator[Staging]:
    """Context manager that claims `output`, and yields a place to write it, which is removed at the
    end.

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
    """Context manager for the only writer of `output`, which works in `partial`. Removes `partial`
    at the end.

    The output's parents are created, and removed if they stay empty.

    Raises:
        OutputError: another trtc is writing this output, or the disk refuses.
    """
    with disk_errors(output), deferred_signals() as signals:
        made: list[Path] = []
        is_interrupted = False
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
        except Exception:
            shutil.rmtree(partial / _JOURNAL, ignore_errors=True)
            raise
        except BaseException:
            is_interrupted = True
            raise
        finally:
            signals.is_open = False
            _empty(partial, output)
            if not is_interrupted:
                shutil.rmtree(partial / _JOURNAL, ignore_errors=True)
            with suppress(OSError):
                (partial / _LOCK).unlink()
                partial.rmdir()
            os.close(lock)
            _remove_if_empty(made)


@contextmanager
def claim_directory(directory: Path) -> Iterator[None]:
    """Context manager for the only process that changes files of a directory in place.

    Raises:
        OutputError: another process does, or the directory cannot be written to.
    """
    with claim(absolute(directory) / ".partial", directory):
        yield


def put_in_place(place: Staging) -> bool:
    """Rename the new directory to the output; False, without effect, if the output exists.

    An empty directory is replaced.
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
    """Exchange the new directory and the old output; the old one is removed with the staging.

    Args:
        check: raises if the old output must not be removed; then it is put back.
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
    """Sync a directory's content to the disk."""
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
    """Replace files of a directory in the given order, then remove others.

    All contents are on the disk before the first file is replaced, and signals are deferred, so a
    full disk changes nothing.

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
    """Context manager that converts errors of the disk (full, not writable) to OutputError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number not in _DISK_ERRORS:
            raise
        raise disk_refusal(output, _DISK_ERRORS[number]) from error


def _error_number(error: Exception) -> int | None:
    """errno of an error; safetensors has it only in the text."""
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
    """An absolute path without `..`; a link at the end is not followed."""
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
    """Refuse a directory that no writer made, because it would be removed later."""
    info = partial.lstat()
    names = {entry.name for entry in partial.iterdir()} if stat.S_ISDIR(info.st_mode) else {""}
    if info.st_uid != os.geteuid() or not names <= {_LOCK, _JOURNAL, *_CONTENT}:
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
    """Remove created parents, innermost first, as long as they are empty."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories atomically; False if the system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    status: int = libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    return status == 0
