"""A quantised checkpoint appears whole or not at all: written aside, then renamed into place."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from trtc.protos.errors import OutputError

_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,  # a parent that is a file
    errno.EXDEV,  # a mount point
)


@dataclass(frozen=True)
class OutputKind:
    """What a command writes, and replaces with --force."""

    name: str
    """`an engine`."""
    mark: str
    """A directory with this file is of this kind."""
    option: str = "--output"
    """Where the user names the output."""


CHECKPOINT = OutputKind("a quantised checkpoint", mark="hf_quant_config.json")


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that is in the way.

    Raises:
        OutputError: it exists and `force` is off, or it is not a quantised checkpoint.
    """
    refuse_occupied(output, CHECKPOINT, force=force)


def refuse_occupied(output: Path, kind: OutputKind, *, force: bool) -> None:
    """Refuse an output that may not be replaced; an empty directory is not in the way.

    Raises:
        OutputError: it exists and `force` is off, or it is not `kind` and so not ours to replace.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not output.is_symlink() and not any(output.iterdir()):
        return
    if not force:
        raise OutputError(
            "exists already",
            field=str(output),
            remedy=f"Choose another {kind.option}, or give --force",
        )
    if output.is_symlink() or not (output / kind.mark).is_file():
        raise OutputError(
            f"exists and is not {kind.name}, so --force will not replace it",
            field=str(output),
            remedy=f"Choose another {kind.option}, or remove it yourself",
        )


@contextmanager
def new_directory(
    output: Path,
    kind: OutputKind = CHECKPOINT,
    *,
    force: bool,
    beside: Path | None = None,
) -> Iterator[Path]:
    """A directory to write into, which becomes `output` if the body ends well.

    Args:
        beside: of what the directory is a hidden sibling until then, on the output's file system;
            None: of the output.

    Raises:
        OutputError: the output is in the way, or the disk refuses.
    """
    refuse_occupied(output, kind, force=force)
    beside = beside or output
    with _disk_errors(output):
        made_parents = make_parents(output)
        aside = Path(tempfile.mkdtemp(prefix=f".{beside.name}.partial-", dir=beside.parent))
    try:
        with _disk_errors(output):
            made = aside / "new"
            made.mkdir()
            yield made
            refuse_occupied(output, kind, force=force)
            if output.exists():
                output.rename(aside / "old")
            made.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        remove_if_empty(made_parents)


def make_parents(output: Path) -> list[Path]:
    """Create the directories above `output` that are missing; returns them, innermost first."""
    missing = [path for path in output.parents if not path.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    return missing


def remove_if_empty(directories: list[Path]) -> None:
    """Take back what `make_parents` made, as far as nothing has come into it."""
    for directory in directories:
        if not any(directory.iterdir()):
            directory.rmdir()


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    """Say a full or forbidden disk as the user's problem that it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise _refused(output, error.strerror or str(error)) from error
    except SafetensorError as error:
        # The library wraps the system's error into text.
        if "os error" not in str(error):
            raise
        raise _refused(output, str(error)) from error


def _refused(output: Path, reason: str) -> OutputError:
    return OutputError(
        f"cannot be written ({reason})",
        field=str(output),
        remedy="Free some space or choose another place; nothing was left behind",
    )
