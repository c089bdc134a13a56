"""A quantised checkpoint appears whole or not at all: written aside, then renamed into place."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trtc.protos.errors import OutputError

_MARK = "hf_quant_config.json"
"""A directory with this file is a quantised checkpoint, which --force may replace."""
_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,  # a parent that is a file
)


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that is in the way.

    Raises:
        OutputError: it exists and `force` is off, or it is not a quantised checkpoint.
    """
    refuse_occupied(output, force=force, mark=_MARK, kind="a quantised checkpoint")


def refuse_occupied(output: Path, *, force: bool, mark: str, kind: str) -> None:
    """Refuse an output that may not be replaced; an empty directory is not in the way.

    Args:
        mark: the file that makes a directory `kind`, which `force` replaces.

    Raises:
        OutputError: it exists and `force` is off, or it is not `kind` and so not ours to replace.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_dir() and not output.is_symlink() and not any(output.iterdir()):
        return
    if not force:
        raise OutputError(
            "exists already", field=str(output), remedy="Choose another --output, or give --force"
        )
    if output.is_symlink() or not (output / mark).is_file():
        raise OutputError(
            f"exists and is not {kind}, so --force will not replace it",
            field=str(output),
            remedy="Choose another --output, or remove it yourself",
        )


@contextmanager
def new_directory(output: Path, *, force: bool) -> Iterator[Path]:
    """A directory to write into, which becomes `output` if the body ends well.

    Raises:
        OutputError: the output is in the way, or the disk refuses.
    """
    check_output(output, force=force)
    with _disk_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        with _disk_errors(output):
            made = aside / "new"
            made.mkdir()
            yield made
            check_output(output, force=force)
            if output.exists():
                output.rename(aside / "old")
            made.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
        remedy="Free some space or choose another --output; nothing was left behind",
    )
